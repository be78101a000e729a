/* Many new tokens: a tile of queries against tiles of keys, by the linear layers' inner loop. */
#ifndef QUIRE_ATTENTION_PREFILL_H
#define QUIRE_ATTENTION_PREFILL_H

#include "attention.h"

#include <stdlib.h>

enum { KEY_TILE = 64 }; /* keys that are in L1 while the rows pass over them */

/* Values of keys [begin, end) as rows of float32. */
static void widen_values(const attention_job *job, const item *work, long begin, long end, float *to) {
    const long dim = job->dim;
    for (long key = begin; key < end; key++, to += job->wide_dim) {
        const char *v = kv_from(job, work->seq, work->kv_head, key, 1);
        FOR_KIND((int)job->spec.kv_kind, for (long d = 0; d < dim; d += VL) store(to + d, load_wide(kind, v, d)))
    }
}

static void prefill_item(const attention_job *job, const item *work) {
    const attention_spec *s = &job->spec;
    const long dim = job->dim, wide_dim = job->wide_dim, row_floats = job->row_floats, group = job->group;
    const long tokens = work->end - work->begin, rows = tokens * group, first_head = work->kv_head * group;
    const long first_token = job->query_starts[work->seq] + work->begin;
    const long first_position = job->kv_lens[work->seq] - new_tokens(job, work->seq) + work->begin, last_key = first_position + tokens;
    float *q; /* too large for some systems' thread stacks */
    const long floats = rows * (dim + CHUNK_STRIDE + 2 * row_floats) + KEY_TILE * (dim + wide_dim);
    if (posix_memalign((void **)&q, 64, (size_t)floats * sizeof(float)) != 0) abort();
    float *scores = q + rows * dim, *sums = scores + rows * CHUNK_STRIDE, *part = sums + rows * row_floats;
    float *k = part + rows * row_floats, *v = k + KEY_TILE * dim;
    memset(k, 0, (size_t)(KEY_TILE * (dim + wide_dim)) * sizeof(float)); /* what lies beside keys and values must be finite */
    for (long r = 0; r < rows; r++) scale_query(job, first_token + r / group, first_head + r % group, q + r * dim);

    const long first_key = s->window ? MAX(0, first_position + 1 - s->window) : 0, unit = panel_keys(s->block_size);
    const long first_chunk = first_key / CHUNK * CHUNK;
    for (long chunk = first_chunk; chunk < last_key; chunk += CHUNK) {
        const long end = MIN(chunk + CHUNK, last_key), begin = MAX(chunk, first_key) / KEY_TILE * KEY_TILE;
        float *into = chunk == first_chunk ? sums : part;
        for (long key = begin; key < end; key += KEY_TILE) {
            const long count = MIN(KEY_TILE, end - key);
            widen_keys(job, work, key, MAX(key, first_key / unit * unit), key + count, k, NR);
            multiply((tile){.a = q, .a_stride = dim, .b = k, .b_stride = NR, .panel_stride = dim * NR,
                            .c = scores + (key - chunk), .c_stride = CHUNK_STRIDE, .depth = dim}, rows, (count + NR - 1) / NR);
        }
        for (long r = 0; r < rows; r++)
            weights_of_row(job, scores + r * CHUNK_STRIDE, first_head + r % group, first_position + r / group, chunk, begin - chunk,
                           end - chunk, into + r * row_floats + wide_dim);
        for (long key = begin; key < end; key += KEY_TILE) {
            const long count = MIN(KEY_TILE, end - key), known = MAX(key, first_key);
            widen_values(job, work, known, key + count, v + (known - key) * wide_dim);
            multiply((tile){.a = scores + (key - chunk), .a_stride = CHUNK_STRIDE, .b = v, .b_stride = wide_dim, .panel_stride = NR,
                            .c = into, .c_stride = row_floats, .depth = count, .accumulate = key > begin}, rows, wide_dim / NR);
        }
        for (long r = 0; r < rows && into == part; r++) add_chunk(sums + r * row_floats, part + r * row_floats, wide_dim);
    }
    for (long r = 0; r < rows; r++) finish_row(job, sums + r * row_floats, first_token + r / group, first_head + r % group);
    free(q);
}

#endif
