/* Several new tokens: a tile of queries against tiles of keys, by the linear layers' inner loop. */
#ifndef QUIRE_ATTENTION_PREFILL_H
#define QUIRE_ATTENTION_PREFILL_H

#include "attention.h"

#include <stdlib.h>

/* Keys [first, first + count) of one KV head: K as panels [count / NR][dim][NR], V as rows [count][wide_dim]. */
static void gather_keys(const attention_job *job, const item *work, long first, long count, float *k_panels, float *v_rows,
                        long wide_dim) {
    const long dim = job->dim;
    const int kind = (int)job->spec.kv_kind;
    _Alignas(64) float wide[MAX_DIM];
    for (long j = 0; j < count; j++) {
        const char *k = kv_tile(job, work->seq, work->kv_head, first + j, 0);
        const char *v = kv_tile(job, work->seq, work->kv_head, first + j, 1);
        float *to = k_panels + j / NR * dim * NR + j % NR, *row = v_rows + j * wide_dim;
        const float *from = (const float *)k;
        if (kind == F32) {
            memcpy(row, v, (size_t)dim * sizeof(float));
        } else {
            for (long d = 0; d < dim; d += VL) {
                store(wide + d, kind == BF16 ? load_wide(BF16, k, d) : load_wide(F16, k, d));
                store(row + d, kind == BF16 ? load_wide(BF16, v, d) : load_wide(F16, v, d));
            }
            from = wide;
        }
        for (long d = 0; d < dim; d++) to[d * NR] = from[d];
    }
}

typedef struct {
    _Alignas(64) float q[PREFILL_ROWS * MAX_DIM], out[PREFILL_ROWS * MAX_DIM], scores[PREFILL_ROWS * PREFILL_KEYS];
    float k[PREFILL_KEYS * MAX_DIM], v[PREFILL_KEYS * MAX_DIM];
    float maximum[PREFILL_ROWS], sum[PREFILL_ROWS];
} prefill_buffers;

static void prefill_item(const attention_job *job, const item *work) {
    const attention_spec *s = &job->spec;
    const long dim = job->dim, wide_dim = (dim + NR - 1) / NR * NR, group = job->group;
    const long rows = (work->end - work->begin) * group, first_token = job->query_starts[work->seq] + work->begin;
    const long new_tokens = job->query_starts[work->seq + 1] - job->query_starts[work->seq];
    const long first_position = job->kv_lens[work->seq] - new_tokens + work->begin;
    const long last_position = first_position + (work->end - work->begin) - 1;
    prefill_buffers *b; /* too large for some systems' thread stacks */
    if (posix_memalign((void **)&b, 64, sizeof *b) != 0) abort();

    for (long r = 0; r < rows; r++) {
        const float *from = job->q + ((first_token + r / group) * s->num_heads + work->kv_head * group + r % group) * dim;
        for (long d = 0; d < dim; d++) b->q[r * dim + d] = from[d] * s->scale;
        b->maximum[r] = s->sinks ? s->sinks[work->kv_head * group + r % group] : -INFINITY;
        b->sum[r] = s->sinks ? 1.0f : 0.0f;
    }
    memset(b->out, 0, (size_t)(rows * wide_dim) * sizeof(float));
    memset(b->v, 0, sizeof b->v); /* the padding columns must stay finite */
    memset(b->k, 0, sizeof b->k);

    const long first_key = s->window ? MAX(0, first_position - s->window + 1) : 0;
    for (long key = first_key; key <= last_position; key += PREFILL_KEYS) {
        const long count = MIN(PREFILL_KEYS, last_position + 1 - key);
        gather_keys(job, work, key, count, b->k, b->v, wide_dim);
        multiply((tile){.a = b->q, .a_stride = dim, .b = b->k, .b_stride = NR, .panel_stride = dim * NR, .c = b->scores,
                        .c_stride = PREFILL_KEYS, .depth = dim}, rows, (count + NR - 1) / NR);
        for (long r = 0; r < rows; r++) {
            float *scores = b->scores + r * PREFILL_KEYS;
            const long position = first_position + r / group;
            const long end = MIN(count, position + 1 - key);
            const long begin = s->window ? MIN(MAX(0, position + 1 - s->window - key), count) : 0;
            if (begin >= end) {
                memset(scores, 0, (size_t)count * sizeof(float));
                continue;
            }
            if (s->slopes) add_slope(scores, count, s->slopes[work->kv_head * group + r % group], key, position);
            const float before = b->maximum[r];
            const float sum = exponentials(scores, begin, end, s->softcap, &b->maximum[r]);
            memset(scores, 0, (size_t)begin * sizeof(float));
            memset(scores + end, 0, (size_t)(count - end) * sizeof(float));
            if (b->maximum[r] > before) {
                const float factor = expf(before - b->maximum[r]);
                b->sum[r] *= factor;
                for (long d = 0; d < dim; d++) b->out[r * wide_dim + d] *= factor;
            }
            b->sum[r] += sum;
        }
        multiply((tile){.a = b->scores, .a_stride = PREFILL_KEYS, .b = b->v, .b_stride = wide_dim, .panel_stride = NR,
                        .c = b->out, .c_stride = wide_dim, .depth = count, .accumulate = 1}, rows, wide_dim / NR);
    }
    for (long r = 0; r < rows; r++) {
        float *out = job->out + ((first_token + r / group) * s->num_heads + work->kv_head * group + r % group) * dim;
        const float inverse = 1.0f / b->sum[r];
        for (long d = 0; d < dim; d++) out[d] = b->out[r * wide_dim + d] * inverse;
    }
    free(b);
}

#endif
