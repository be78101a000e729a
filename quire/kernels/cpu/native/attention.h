/* What both forms of attention share: the job, where keys and values lie, and the order in which a token's keys are summed,
 * which is the same in both and depends on nothing but the token's position:
 *
 * Keys are taken in chunks of CHUNK, which begin at its multiples. A chunk's scores become exponentials of their distance to
 * the chunk's maximum, and the values are weighed by these in order. Chunks are added up in order (add_chunk); a sink comes
 * last (finish_row). The functions that round are compiled once for both, so that both round alike. */
#ifndef QUIRE_ATTENTION_H
#define QUIRE_ATTENTION_H

#include "kv.h"
#include "tile.h"

#define ONCE static __attribute__((noinline, unused))

/* Runs `statement` with `kind`, that of the cache, a constant. */
#define FOR_KIND(value, statement)                                                                                     \
    switch (value) {                                                                                                   \
    case F32: { enum { kind = F32 }; statement; } break;                                                               \
    case BF16: { enum { kind = BF16 }; statement; } break;                                                             \
    default: { enum { kind = F16 }; statement; } break;                                                                \
    }

enum {
    MAX_DIM = 256,
    CHUNK = 256, /* keys; a multiple of every block size */
    CHUNK_STRIDE = CHUNK + 16, /* no power of two: rows would share the cache's sets */
    PREFILL_ROWS = 192, /* query tokens x heads of one group */
    TOTALS = 16, /* floats of a row of sums beside its values: the maximum, the sum of the weights, padding */
    MAX_ROW_FLOATS = MAX_DIM + NR + TOTALS,
};

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size, kv_kind, block_stride, window; /* 0: none */
    float scale, softcap; /* 0: none */
    const float *slopes;  /* a head's logits fall by so much a token of distance; or NULL */
    const float *sinks;   /* a head's logit that no key has: it takes a share of the softmax; or NULL */
} attention_spec;

typedef struct {
    int32_t seq, kv_head;
    int32_t begin, end;  /* decode: keys; prefill: query tokens, counted in the sequence's new ones */
    int32_t partial;     /* decode: its first row among the partial results, or -1: the only chunk */
    int32_t num_chunks;  /* of a sequence's first chunk, where there are several: how many */
} item;

typedef struct {
    attention_spec spec;
    const char *kv;
    const float *q;
    float *out, *partials;
    const int32_t *query_starts, *kv_lens, *tables;
    const item *items;
    long table_width, group, dim;
    long wide_dim, row_floats; /* a row of sums: values[wide_dim], totals[TOTALS] */
} attention_job;

/* One head's keys or values of the block that has `key`. */
static const char *kv_tile(const attention_job *job, int seq, int kv_head, long key, int is_v) {
    const attention_spec *s = &job->spec;
    const long block = job->tables[seq * job->table_width + key / s->block_size];
    const long at = block * s->block_stride + ((is_v ? s->num_kv_heads : 0) + kv_head) * s->block_size * job->dim;
    return job->kv + at * kind_bytes((int)s->kv_kind);
}

/* A panel of keys, or the row of a value, from `key` on. */
static const char *kv_from(const attention_job *job, int seq, int kv_head, long key, int is_v) {
    return kv_tile(job, seq, kv_head, key, is_v) + key % job->spec.block_size * job->dim * kind_bytes((int)job->spec.kv_kind);
}

/* Keys [begin, end) as float32 in panels to[..][dim][width], of which key `origin` is the first; all three are the first ones
 * of panels in their blocks, or the end. */
static void widen_keys(const attention_job *job, const item *work, long origin, long begin, long end, float *to, long width) {
    const int of_kind = (int)job->spec.kv_kind;
    const long dim = job->dim, unit = panel_keys(job->spec.block_size);
    for (long key = begin; key < end; key += unit) {
        const char *from = kv_from(job, work->seq, work->kv_head, key, 0);
        float *panel = to + (key - origin) / width * dim * width + (key - origin) % width;
        if (unit % VL == 0) {
            for (long d = 0; d < dim; d++)
                for (long i = 0; i < unit; i += VL)
                    FOR_KIND(of_kind, store(panel + d * width + i, load_wide(kind, from, d * unit + i)))
        } else {
            for (long d = 0; d < dim; d++)
                for (long i = 0; i < unit; i++) panel[d * width + i] = load_one(of_kind, from, d * unit + i);
        }
    }
}

/* scores[begin .. end) become exp(score - maximum), whose sum is returned; the maximum is raised to theirs in place. What else
 * lies in their vectors is overwritten. */
ONCE float exponentials(float *scores, long begin, long end, float softcap, float *maximum) {
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

INLINE long new_tokens(const attention_job *job, long seq) { return job->query_starts[seq + 1] - job->query_starts[seq]; }

/* Which keys of a chunk the token at `position` sees, counted from the chunk's beginning: [begin, end), or none. */
INLINE void visible_keys(const attention_job *job, long position, long chunk, long *begin, long *end) {
    *begin = job->spec.window ? MAX(0, position + 1 - job->spec.window - chunk) : 0;
    *end = MIN(CHUNK, position + 1 - chunk);
}

/* The scores of one query in a chunk become weights, 0 where it sees no key of [begin, end); their maximum and sum are totals. */
ONCE void weights_of_row(const attention_job *job, float *scores, long head, long position, long chunk, long begin, long end,
                         float *totals) {
    long from, to;
    visible_keys(job, position, chunk, &from, &to);
    totals[0] = -INFINITY;
    totals[1] = 0;
    if (from >= to) {
        memset(scores + begin, 0, (size_t)(end - begin) * sizeof(float));
        return;
    }
    for (long i = from; i < to && job->spec.slopes; i++) scores[i] += job->spec.slopes[head] * (float)(chunk + i - position);
    totals[1] = exponentials(scores, from, to, job->spec.softcap, &totals[0]);
    if (from > begin) memset(scores + begin, 0, (size_t)(from - begin) * sizeof(float));
    if (to < end) memset(scores + to, 0, (size_t)(end - to) * sizeof(float));
}

/* Adds a later chunk's row of sums to `row`; either may have seen no key. */
ONCE void add_chunk(float *row, const float *chunk, long wide_dim) {
    if (chunk[wide_dim + 1] == 0) return;
    const float maximum = MAX(row[wide_dim], chunk[wide_dim]);
    const float old = expf(row[wide_dim] - maximum), new = expf(chunk[wide_dim] - maximum);
    for (long d = 0; d < wide_dim; d++) row[d] = row[d] * old + chunk[d] * new;
    row[wide_dim] = maximum;
    row[wide_dim + 1] = row[wide_dim + 1] * old + chunk[wide_dim + 1] * new;
}

/* The average of the values of all keys; `head` is the query's. */
ONCE void finish_row(const attention_job *job, const float *row, long token, long head) {
    const long dim = job->dim, wide_dim = job->wide_dim;
    float factor = 1.0f / row[wide_dim + 1];
    if (job->spec.sinks) {
        const float sink = job->spec.sinks[head], maximum = MAX(row[wide_dim], sink);
        const float share = expf(row[wide_dim] - maximum);
        factor = share / (row[wide_dim + 1] * share + expf(sink - maximum));
    }
    float *out = job->out + (token * job->spec.num_heads + head) * dim;
    for (long d = 0; d < dim; d++) out[d] = row[d] * factor;
}

static void scale_query(const attention_job *job, long token, long head, float *to) {
    const float *from = job->q + (token * job->spec.num_heads + head) * job->dim;
    for (long i = 0; i < job->dim; i++) to[i] = from[i] * job->spec.scale;
}

#endif
