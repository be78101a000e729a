/* One new token: the query heads of one KV head over a chunk of keys; and the merging of chunks. */
#ifndef QUIRE_ATTENTION_DECODE_H
#define QUIRE_ATTENTION_DECODE_H

#include "attention.h"

enum { HEAD_TILE = (int)MR < 4 ? (int)MR : 4 }; /* query heads at once */

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#if defined(__AVX512F__)
#define LANES(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, d + 8, a + 12, b + 12, c + 12, d + 12
#elif defined(__AVX2__)
#define LANES(a, b, c, d) a, b, c, d, a + 4, b + 4, c + 4, d + 4
#else
#define LANES(a, b, c, d) a, b, c, d
#endif

/* The sums of four vectors' lanes, by a transposing tree within 128-bit lanes and then across them. */
INLINE v4 sum_four(vf a, vf b, vf c, vf d) {
    vf ab = SHUFFLE(a, b, LANES(0, VL, 1, VL + 1)) + SHUFFLE(a, b, LANES(2, VL + 2, 3, VL + 3));
    vf cd = SHUFFLE(c, d, LANES(0, VL, 1, VL + 1)) + SHUFFLE(c, d, LANES(2, VL + 2, 3, VL + 3));
    vf all = SHUFFLE(ab, cd, LANES(0, 1, VL, VL + 1)) + SHUFFLE(ab, cd, LANES(2, 3, VL + 2, VL + 3));
    float lanes[VL];
    store(lanes, all);
    v4 sum = *(const v4 *)lanes;
    for (int i = 4; i < VL; i += 4) sum += *(const v4 *)(lanes + i);
    return sum;
}

/* scores[head][0 .. num_keys) of keys [num_keys, dim], four at a time; num_keys is a multiple of 4. */
INLINE void dots(int heads, int kind, const float *q, const char *k, long dim, long num_keys, float *scores, long stride,
                 const char *next_k, const char *v) {
    for (long key = 0; key < num_keys; key += 4, k += 4 * dim * kind_bytes(kind)) {
        vf acc[HEAD_TILE][4];
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < 4; j++) acc[h][j] = (vf){0};
        for (long d = 0; d < dim; d += VL) {
            vf keys[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) keys[j] = load_wide(kind, k, j * dim + d);
#pragma GCC unroll 4
            for (int h = 0; h < heads; h++) {
                vf x = load(q + h * dim + d);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) acc[h][j] += x * keys[j];
            }
        }
        /* Blocks lie anywhere, so no hardware stream finds the next one; V waits in L2 until its turn. */
        for (long at = key * dim * kind_bytes(kind); at < (key + 4) * dim * kind_bytes(kind); at += 64) {
            __builtin_prefetch(next_k + at);
            __builtin_prefetch(v + at, 0, 2);
        }
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            *(v4 *)(scores + h * stride + key) = sum_four(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
    }
}

INLINE void dots_of_kind(int kind, int heads, const float *q, const char *k, long dim, long num_keys, float *scores,
                         long stride, const char *next_k, const char *v) {
    if (heads == 1) dots(1, kind, q, k, dim, num_keys, scores, stride, next_k, v);
    else if (heads == 2) dots(2, kind, q, k, dim, num_keys, scores, stride, next_k, v);
    else if (heads == 3) dots(3, kind, q, k, dim, num_keys, scores, stride, next_k, v);
    else dots(HEAD_TILE, kind, q, k, dim, num_keys, scores, stride, next_k, v);
}

static void score_block(int kind, int heads, const float *q, const char *k, long dim, long num_keys, float *scores,
                        long stride, const char *next_k, const char *v) {
    if (kind == F32) dots_of_kind(F32, heads, q, k, dim, num_keys, scores, stride, next_k, v);
    else if (kind == BF16) dots_of_kind(BF16, heads, q, k, dim, num_keys, scores, stride, next_k, v);
    else dots_of_kind(F16, heads, q, k, dim, num_keys, scores, stride, next_k, v);
}

/* acc[heads][dim] += weights[heads][num_keys] * V[num_keys][dim] */
INLINE void weigh_values(int kind, int heads, tile *t, long dim) {
    const char *v = t->b;
    float *c = t->c;
    long d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) {
        t->b = v + d * kind_bytes(kind);
        t->c = c + d;
        if (heads == 1) run_tile(t, 1, 4, kind, 0);
        else if (heads == 2) run_tile(t, 2, 4, kind, 0);
        else if (heads == 3) run_tile(t, 3, 4, kind, 0);
        else run_tile(t, HEAD_TILE, 4, kind, 0);
    }
    for (; d < dim; d += VL) {
        t->b = v + d * kind_bytes(kind);
        t->c = c + d;
        if (heads == 1) run_tile(t, 1, 1, kind, 0);
        else if (heads == 2) run_tile(t, 2, 1, kind, 0);
        else if (heads == 3) run_tile(t, 3, 1, kind, 0);
        else run_tile(t, HEAD_TILE, 1, kind, 0);
    }
}

static void add_block(int kind, int heads, tile *t, long dim) {
    if (kind == F32) weigh_values(F32, heads, t, dim);
    else if (kind == BF16) weigh_values(BF16, heads, t, dim);
    else weigh_values(F16, heads, t, dim);
}

/* Keys [work->begin, work->end) for one token; to `partials` [group], or if that is NULL to its output. */
static void decode_chunk(const attention_job *job, const item *work, long token, long position, float *partials) {
    const attention_spec *s = &job->spec;
    const long dim = job->dim, base = work->begin / 4 * 4, block_size = s->block_size;
    const int kind = (int)s->kv_kind;
    enum { STRIDE = DECODE_CHUNK + 16 }; /* room for the vectors that reach past either end */
    _Alignas(64) float scores[HEAD_TILE * STRIDE], acc[HEAD_TILE * MAX_DIM], q[HEAD_TILE * MAX_DIM];
    const int tiles = (int)(job->group + HEAD_TILE - 1) / HEAD_TILE;
    const int per_tile = (int)(job->group + tiles - 1) / tiles;
    for (int g = 0; g < job->group; g += per_tile) {
        const int heads = (int)MIN(per_tile, job->group - g);
        const long first_head = work->kv_head * job->group + g;
        const float *from = job->q + (token * s->num_heads + first_head) * dim;
        for (long i = 0; i < heads * dim; i++) q[i] = from[i] * s->scale;
        for (long key = base; key < work->end;) {
            const long block_end = MIN((key / block_size + 1) * block_size, work->end);
            const char *next_k = kv_tile(job, work->seq, work->kv_head, block_end < work->end ? block_end : key, 0);
            const char *v = kv_tile(job, work->seq, work->kv_head, key, 1);
            score_block(kind, heads, q, kv_tile(job, work->seq, work->kv_head, key, 0), dim, (block_end - key + 3) / 4 * 4,
                        scores + (key - base), STRIDE, next_k, v);
            key = block_end;
        }
        float maximum[HEAD_TILE], sum[HEAD_TILE];
        for (int h = 0; h < heads; h++) {
            const float *sink = s->sinks && partials == NULL ? &s->sinks[first_head + h] : NULL; /* else it is merged in */
            if (s->slopes) add_slope(scores + h * STRIDE, work->end - base, s->slopes[first_head + h], base, position);
            maximum[h] = sink ? *sink : -INFINITY;
            sum[h] = exponentials(scores + h * STRIDE, work->begin - base, work->end - base, s->softcap, &maximum[h]);
            if (sink) sum[h] += expf(*sink - maximum[h]);
        }
        for (long key = work->begin; key < work->end;) {
            const long block_end = MIN((key / block_size + 1) * block_size, work->end);
            tile t = {.a = scores + (key - base), .a_stride = STRIDE, .b_stride = dim, .panel_stride = NR};
            t.b = kv_tile(job, work->seq, work->kv_head, key, 1);
            t.c = acc;
            t.c_stride = MAX_DIM;
            t.depth = block_end - key;
            t.accumulate = key > work->begin;
            add_block(kind, heads, &t, dim);
            key = block_end;
        }
        for (int h = 0; h < heads; h++) {
            if (partials == NULL) {
                float *out = job->out + (token * s->num_heads + first_head + h) * dim;
                for (long d = 0; d < dim; d++) out[d] = acc[h * MAX_DIM + d] / sum[h];
            } else {
                float *out = partials + (g + h) * job->partial_floats;
                out[0] = maximum[h];
                out[1] = sum[h];
                memcpy(out + 2, acc + h * MAX_DIM, (size_t)dim * sizeof(float));
            }
        }
    }
}

static float *partial_at(const attention_job *job, long partial) {
    return job->partials + partial * job->group * job->partial_floats;
}

static void decode_item(const attention_job *job, const item *work) {
    decode_chunk(job, work, job->query_starts[work->seq], job->kv_lens[work->seq] - 1, work->partial < 0 ? NULL : partial_at(job, work->partial));
}

/* The chunks of one token and KV head, `num_chunks` from `partials` on, into its output rows. */
static void merge_token(const attention_job *job, long token, long kv_head, const float *partials, long num_chunks) {
    const long dim = job->dim;
    for (long h = 0; h < job->group; h++) {
        float *out = job->out + (token * job->spec.num_heads + kv_head * job->group + h) * dim;
        const float *first = partials + h * job->partial_floats;
        const long step = job->group * job->partial_floats;
        const float *sink = job->spec.sinks ? &job->spec.sinks[kv_head * job->group + h] : NULL;
        float maximum = sink ? *sink : -INFINITY, sum = 0;
        for (long c = 0; c < num_chunks; c++) maximum = MAX(maximum, first[c * step]);
        if (sink) sum = expf(*sink - maximum);
        memset(out, 0, (size_t)dim * sizeof(float));
        for (long c = 0; c < num_chunks; c++) {
            const float *part = first + c * step, factor = expf(part[0] - maximum);
            sum += factor * part[1];
            for (long d = 0; d < dim; d++) out[d] += factor * part[2 + d];
        }
        for (long d = 0; d < dim; d++) out[d] /= sum;
    }
}

static void merge_chunks(const attention_job *job, const item *work) {
    merge_token(job, job->query_starts[work->seq], work->kv_head, partial_at(job, work->partial), work->num_partials);
}

/* A tile of a prompt's tokens, each summed as if it were decoded: in chunks of keys that depend on its position alone. A
 * chunk of keys stays in the cache while the tokens pass over it. */
static void invariant_item(const attention_job *job, const item *work) {
    const attention_spec *s = &job->spec;
    const long first_token = job->query_starts[work->seq], count = work->end - work->begin;
    const long first_position = job->kv_lens[work->seq] - (job->query_starts[work->seq + 1] - first_token) + work->begin;
    const long last = first_position + count, per_token = job->group * job->partial_floats;
    const long first_chunk = (s->window ? MAX(0, first_position + 1 - s->window) : 0) / DECODE_CHUNK;
    const long most = (last - 1) / DECODE_CHUNK - first_chunk + 1;
    float *partials = malloc((size_t)(count * most * per_token) * sizeof(float));
    if (!partials) abort();
    for (long c = 0; c < most; c++)
        for (long t = 0; t < count; t++) {
            const long end = first_position + t + 1, first = s->window ? MAX(0, end - s->window) : 0;
            const long own = first / DECODE_CHUNK, chunks = (end - 1) / DECODE_CHUNK - own + 1, chunk = first_chunk + c;
            if (chunk < own || chunk >= own + chunks) continue;
            const long begin = chunk * DECODE_CHUNK, token = first_token + work->begin + t;
            const item keys = {work->seq, work->kv_head, MAX(begin, first), MIN(begin + DECODE_CHUNK, end), -1, 0};
            float *to = partials + (t * most + chunk - own) * per_token;
            decode_chunk(job, &keys, token, end - 1, chunks > 1 ? to : NULL);
            if (chunks > 1 && chunk == own + chunks - 1)
                merge_token(job, token, work->kv_head, partials + t * most * per_token, chunks);
        }
    free(partials);
}

#endif
