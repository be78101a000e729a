/* Causal attention over paged KV, read in place through the block tables.
 *
 *     kv[block][2][kv_heads][block_size][head_dim]
 *
 * One new token (decode): an item is one KV head over DECODE_CHUNK keys; the query heads that share it go together, so K
 * and V are read once. A longer sequence has several chunks, merged at the end; their bounds depend on nothing but the
 * sequence, so neither does its result.
 * Several new tokens (prefill): an item is one KV head and a tile of queries; keys pass by in tiles that are transposed
 * into a buffer once and used by all rows, with the running maximum and sum of an online softmax. That sums in another
 * order than a decode; where results must not depend on who was computed with whom, and of drafts, each token is summed as a
 * decode. */
#include "attention_decode.h"
#include "attention_prefill.h"
#include "pool.h"

enum { INLINE_WORK = 1 << 15 }; /* multiply-adds; less is not worth waking a thread for */

static void attend(void *context, long index) {
    const attention_job *job = context;
    const item *work = &job->items[index];
    if (job->query_starts[work->seq + 1] - job->query_starts[work->seq] == 1) decode_item(job, work);
    else if (job->spec.invariant) invariant_item(job, work);
    else prefill_item(job, work);
}

static void merge(void *context, long index) {
    const attention_job *job = context;
    if (job->items[index].num_partials > 0) merge_chunks(job, &job->items[index]);
}

/* Lists the items, the longest first; with items NULL only counts them. */
static long list_items(const attention_job *job, long num_seqs, item *items, long *num_partials, long *work) {
    const attention_spec *s = &job->spec;
    const long tile_tokens = MAX(1, PREFILL_ROWS / job->group);
    long count = 0;
    *num_partials = *work = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        const long new_tokens = job->query_starts[seq + 1] - job->query_starts[seq];
        if (new_tokens <= 1) continue;
        for (long begin = (new_tokens - 1) / tile_tokens * tile_tokens; begin >= 0; begin -= tile_tokens)
            for (long h = 0; h < s->num_kv_heads; h++, count++)
                if (items) items[count] = (item){seq, h, begin, MIN(begin + tile_tokens, new_tokens), -1, 0};
        *work += new_tokens * job->kv_lens[seq] * s->num_heads * job->dim;
    }
    for (long seq = 0; seq < num_seqs; seq++) {
        if (job->query_starts[seq + 1] - job->query_starts[seq] != 1) continue;
        const long end = job->kv_lens[seq], first = s->window ? MAX(0, end - s->window) : 0;
        const long chunks = (end - 1) / DECODE_CHUNK - first / DECODE_CHUNK + 1;
        for (long h = 0; h < s->num_kv_heads; h++)
            for (long c = 0; c < chunks; c++, count++) {
                if (items) {
                    const long begin = (first / DECODE_CHUNK + c) * DECODE_CHUNK;
                    items[count] = (item){seq, h, MAX(begin, first), MIN(begin + DECODE_CHUNK, end), -1, 0};
                    if (chunks > 1) items[count].partial = *num_partials;
                    if (chunks > 1 && c == 0) items[count].num_partials = chunks;
                }
                *num_partials += chunks > 1;
            }
        *work += (end - first) * s->num_heads * job->dim;
    }
    return count;
}

void EXPORT(attention)(quire_pool *pool, const attention_spec *spec, const void *kv, const float *q, float *out,
                       const int32_t *query_starts, const int32_t *kv_lens, const int32_t *tables, int64_t table_width,
                       int64_t num_seqs) {
    attention_job job = {.spec = *spec, .kv = kv, .q = q, .out = out, .query_starts = query_starts, .kv_lens = kv_lens,
                         .tables = tables, .table_width = table_width, .dim = spec->head_dim, .group = spec->num_heads / spec->num_kv_heads};
    job.partial_floats = job.dim + 2;
    long num_partials, work;
    const long count = list_items(&job, num_seqs, NULL, &num_partials, &work);
    item *items = malloc((size_t)(count + 1) * sizeof(item));
    float *partials = malloc((size_t)(num_partials * job.group * job.partial_floats + 1) * sizeof(float));
    if (!items || !partials) abort(); /* a few kilobytes: the process is past saving */
    list_items(&job, num_seqs, items, &num_partials, &work);
    job.items = items;
    job.partials = partials;
    if (work < INLINE_WORK)
        for (long i = 0; i < count; i++) attend(&job, i);
    else
        quire_parallel(pool, count, attend, &job);
    if (num_partials > 0) quire_parallel(pool, count, merge, &job);
    free(partials);
    free(items);
}
