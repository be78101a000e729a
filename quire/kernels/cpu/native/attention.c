/* Causal attention over paged KV (kv.h), read in place through the block tables.
 *
 * One new token (decode), or a few: an item is one KV head over a chunk of keys; the query heads that share it go together, so
 * K and V are read once. A longer sequence has several chunks, merged at the end.
 * Many new tokens (prefill): an item is one KV head and a tile of queries; the chunks pass by in turn, each widened into a
 * buffer once for all rows.
 * A token's result is the same in both, bit for bit (attention.h): whether it was decoded, part of a prompt, or drafted, and
 * where its prompt was cut. */
#include "attention_decode.h"
#include "attention_prefill.h"
#include "pool.h"

enum {
    INLINE_WORK = 1 << 15, /* multiply-adds; less is not worth waking a thread for */
    FEW_ROWS = 32,         /* query tokens x heads of one group that are attended to as decodes are */
};

static int is_decode(const attention_job *job, long seq) { return new_tokens(job, seq) == 1 || new_tokens(job, seq) * job->group <= FEW_ROWS; }

static void attend(void *context, long index) {
    const attention_job *job = context;
    const item *work = &job->items[index];
    if (is_decode(job, work->seq)) decode_item(job, work);
    else prefill_item(job, work);
}

static void merge(void *context, long index) {
    const attention_job *job = context;
    if (job->items[index].num_chunks > 0) merge_chunks(job, &job->items[index]);
}

/* Lists the items, the longest first; with items NULL only counts them. */
static long list_items(const attention_job *job, long num_seqs, item *items, long *num_partials, long *work) {
    const attention_spec *s = &job->spec;
    const long tile_tokens = MAX(1, PREFILL_ROWS / job->group);
    long count = 0;
    *num_partials = *work = 0;
    for (long seq = 0; seq < num_seqs; seq++) {
        const long tokens = new_tokens(job, seq);
        if (tokens == 0 || is_decode(job, seq)) continue;
        for (long begin = (tokens - 1) / tile_tokens * tile_tokens; begin >= 0; begin -= tile_tokens)
            for (long h = 0; h < s->num_kv_heads; h++, count++)
                if (items) items[count] = (item){seq, h, begin, MIN(begin + tile_tokens, tokens), -1, 0};
        *work += tokens * job->kv_lens[seq] * s->num_heads * job->dim;
    }
    for (long seq = 0; seq < num_seqs; seq++) {
        const long tokens = new_tokens(job, seq);
        if (tokens == 0 || !is_decode(job, seq)) continue;
        const long end = job->kv_lens[seq], first = s->window ? MAX(0, end - tokens + 1 - s->window) : 0;
        const long chunks = (end - 1) / CHUNK - first / CHUNK + 1;
        for (long h = 0; h < s->num_kv_heads; h++)
            for (long c = 0; c < chunks; c++, count++) {
                if (items) {
                    const long begin = (first / CHUNK + c) * CHUNK;
                    items[count] = (item){seq, h, MAX(begin, first), MIN(begin + CHUNK, end), -1, 0};
                    if (chunks > 1) items[count].partial = *num_partials;
                    if (chunks > 1 && c == 0) items[count].num_chunks = chunks;
                }
                if (chunks > 1) *num_partials += tokens * job->group;
            }
        *work += tokens * (end - first) * s->num_heads * job->dim;
    }
    return count;
}

void EXPORT(attention)(quire_pool *pool, const attention_spec *spec, const void *kv, const float *q, float *out,
                       const int32_t *query_starts, const int32_t *kv_lens, const int32_t *tables, int64_t table_width,
                       int64_t num_seqs) {
    attention_job job = {.spec = *spec, .kv = kv, .q = q, .out = out, .query_starts = query_starts, .kv_lens = kv_lens,
                         .tables = tables, .table_width = table_width, .dim = spec->head_dim, .group = spec->num_heads / spec->num_kv_heads};
    job.wide_dim = (job.dim + NR - 1) / NR * NR;
    job.row_floats = job.wide_dim + TOTALS;
    long num_partials, work;
    const long count = list_items(&job, num_seqs, NULL, &num_partials, &work);
    item *items = malloc((size_t)(count + 1) * sizeof(item));
    float *partials = malloc((size_t)(num_partials * job.row_floats + 1) * sizeof(float));
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
