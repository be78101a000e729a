/* What both forms of attention share: the job, where a key or value lies, and the softmax. */
#ifndef QUIRE_ATTENTION_H
#define QUIRE_ATTENTION_H

#include "tile.h"

enum {
    MAX_DIM = 256,
    DECODE_CHUNK = 256, /* keys; a multiple of every block size */
    PREFILL_ROWS = 192, /* query tokens x heads of one group */
    PREFILL_KEYS = 64,
};

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size, kv_kind, block_stride, window; /* 0: none */
    int64_t invariant; /* prompts are summed in the order of decodes */
    float scale, softcap; /* 0: none */
    const float *slopes;  /* a head's logits fall by so much a token of distance; or NULL */
    const float *sinks;   /* a head's logit that no key has: it takes a share of the softmax; or NULL */
} attention_spec;

typedef struct {
    int32_t seq, kv_head;
    int32_t begin, end;   /* decode: keys; prefill: query tokens, counted in the sequence's new ones */
    int32_t partial;      /* decode: index of its partial result, or -1: the only chunk */
    int32_t num_partials; /* of a sequence's first chunk: how many follow from `partial` on */
} item;

typedef struct {
    attention_spec spec;
    const char *kv;
    const float *q;
    float *out, *partials;
    const int32_t *query_starts, *kv_lens, *tables;
    const item *items;
    long table_width, group, dim, partial_floats;
} attention_job;

static const char *kv_tile(const attention_job *job, int seq, int kv_head, long key, int is_v) {
    const attention_spec *s = &job->spec;
    const long block = job->tables[seq * job->table_width + key / s->block_size];
    const long at = block * s->block_stride + ((is_v ? s->num_kv_heads : 0) + kv_head) * s->block_size * job->dim;
    return job->kv + (at + key % s->block_size * job->dim) * kind_bytes((int)s->kv_kind);
}

/* scores[begin .. end) become exp(score - maximum), whose sum is returned; the running maximum is raised in place. What
 * else lies in their vectors is overwritten. */
INLINE float exponentials(float *scores, long begin, long end, float softcap, float *maximum) {
    const long padded = (end + VL - 1) / VL * VL;
    for (long i = begin / VL * VL; i < begin; i++) scores[i] = -INFINITY;
    for (long i = end; i < padded; i++) scores[i] = -INFINITY;
    vf top = splat(*maximum);
    for (long i = begin / VL * VL; i < padded; i += VL) {
        vf x = load(scores + i);
        if (softcap > 0) {
            x = pick(x < -3e38f, x, softcap * vtanh(x * (1.0f / softcap)));
            store(scores + i, x);
        }
        top = vmax(x, top);
    }
    *maximum = max_lanes(top);
    vf sum = {0}, largest = splat(*maximum);
    for (long i = begin / VL * VL; i < padded; i += VL) {
        vf p = vexp(load(scores + i) - largest);
        store(scores + i, p);
        sum += p;
    }
    return sum_lanes(sum);
}

/* scores[0 .. count) are of keys from `first_key` on, for a query at `position`. */
INLINE void add_slope(float *scores, long count, float slope, long first_key, long position) {
    for (long i = 0; i < count; i++) scores[i] += slope * (float)(first_key + i - position);
}

#endif
