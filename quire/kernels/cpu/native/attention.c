/* Causal attention over paged KV, read in place through the block tables.
 *
 *     kv[block][2][kv_heads][block_size][head_dim]
 *
 * One new token (decode): an item is one KV head over DECODE_CHUNK keys; the query heads that share it go together, so K
 * and V are read once. A longer sequence has several chunks, merged at the end; their bounds depend on nothing but the
 * sequence, so neither does its result.
 * Several new tokens (prefill): an item is one KV head and a tile of queries; keys pass by in tiles that are transposed
 * into a buffer once and used by all rows, with the running maximum and sum of an online softmax. */
#include "pool.h"
#include "tile.h"

#include <stdlib.h>

enum {
    MAX_DIM = 256,
    DECODE_CHUNK = 256, /* keys; a multiple of every block size */
    HEAD_TILE = (int)MR < 4 ? (int)MR : 4, /* query heads at once in decode */
    PREFILL_ROWS = 192, /* query tokens x heads of one group */
    PREFILL_KEYS = 64,
    INLINE_WORK = 1 << 15, /* multiply-adds; less is not worth waking a thread for */
};

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size, kv_kind, block_stride, window; /* 0: none */
    float scale, softcap; /* 0: none */
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
                 const char *next) {
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
        for (long at = key * dim * kind_bytes(kind); at < (key + 4) * dim * kind_bytes(kind); at += 64)
            __builtin_prefetch(next + at);
#pragma GCC unroll 4
        for (int h = 0; h < heads; h++)
            *(v4 *)(scores + h * stride + key) = sum_four(acc[h][0], acc[h][1], acc[h][2], acc[h][3]);
    }
}

INLINE void dots_of_kind(int kind, int heads, const float *q, const char *k, long dim, long num_keys, float *scores,
                         long stride, const char *next) {
    if (heads == 1) dots(1, kind, q, k, dim, num_keys, scores, stride, next);
    else if (heads == 2) dots(2, kind, q, k, dim, num_keys, scores, stride, next);
    else if (heads == 3) dots(3, kind, q, k, dim, num_keys, scores, stride, next);
    else dots(HEAD_TILE, kind, q, k, dim, num_keys, scores, stride, next);
}

static void score_block(int kind, int heads, const float *q, const char *k, long dim, long num_keys, float *scores,
                        long stride, const char *next) {
    if (kind == F32) dots_of_kind(F32, heads, q, k, dim, num_keys, scores, stride, next);
    else if (kind == BF16) dots_of_kind(BF16, heads, q, k, dim, num_keys, scores, stride, next);
    else dots_of_kind(F16, heads, q, k, dim, num_keys, scores, stride, next);
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

/* scores[begin .. end) become exp(score - maximum), everything else in [0, round_up(end, VL)) zero's neighbour. The running
 * maximum is raised in place; returns the sum. */
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

static void decode_item(const attention_job *job, const item *work) {
    const attention_spec *s = &job->spec;
    const long dim = job->dim, base = work->begin / 4 * 4, block_size = s->block_size;
    const int kind = (int)s->kv_kind;
    enum { STRIDE = DECODE_CHUNK + 16 }; /* room for the vectors that reach past either end */
    _Alignas(64) float scores[HEAD_TILE * STRIDE], acc[HEAD_TILE * MAX_DIM], q[HEAD_TILE * MAX_DIM];
    const long token = job->query_starts[work->seq];
    const int tiles = (int)(job->group + HEAD_TILE - 1) / HEAD_TILE;
    const int per_tile = (int)(job->group + tiles - 1) / tiles;
    for (int g = 0; g < job->group; g += per_tile) {
        const int heads = (int)MIN(per_tile, job->group - g);
        const long first_head = work->kv_head * job->group + g;
        const float *from = job->q + (token * s->num_heads + first_head) * dim;
        for (long i = 0; i < heads * dim; i++) q[i] = from[i] * s->scale;
        for (long key = base; key < work->end;) {
            const long block_end = MIN((key / block_size + 1) * block_size, work->end);
            const char *next = kv_tile(job, work->seq, work->kv_head, block_end < work->end ? block_end : key, 0);
            score_block(kind, heads, q, kv_tile(job, work->seq, work->kv_head, key, 0), dim, (block_end - key + 3) / 4 * 4,
                        scores + (key - base), STRIDE, next);
            key = block_end;
        }
        float maximum[HEAD_TILE], sum[HEAD_TILE];
        for (int h = 0; h < heads; h++) {
            maximum[h] = -INFINITY;
            sum[h] = exponentials(scores + h * STRIDE, work->begin - base, work->end - base, s->softcap, &maximum[h]);
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
            if (work->partial < 0) {
                float *out = job->out + (token * s->num_heads + first_head + h) * dim;
                for (long d = 0; d < dim; d++) out[d] = acc[h * MAX_DIM + d] / sum[h];
            } else {
                float *out = job->partials + (work->partial * job->group + g + h) * job->partial_floats;
                out[0] = maximum[h];
                out[1] = sum[h];
                memcpy(out + 2, acc + h * MAX_DIM, (size_t)dim * sizeof(float));
            }
        }
    }
}

/* The chunks of one sequence and KV head into its output rows. */
static void merge_chunks(const attention_job *job, const item *work) {
    const long dim = job->dim, token = job->query_starts[work->seq];
    for (long h = 0; h < job->group; h++) {
        float *out = job->out + (token * job->spec.num_heads + work->kv_head * job->group + h) * dim;
        const float *first = job->partials + (work->partial * job->group + h) * job->partial_floats;
        const long step = job->group * job->partial_floats;
        float maximum = -INFINITY, sum = 0;
        for (long c = 0; c < work->num_partials; c++) maximum = MAX(maximum, first[c * step]);
        memset(out, 0, (size_t)dim * sizeof(float));
        for (long c = 0; c < work->num_partials; c++) {
            const float *part = first + c * step, factor = expf(part[0] - maximum);
            sum += factor * part[1];
            for (long d = 0; d < dim; d++) out[d] += factor * part[2 + d];
        }
        for (long d = 0; d < dim; d++) out[d] /= sum;
    }
}

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

/* c[rows][panels * NR] (+)= a[rows][depth] * b, tile by tile; all in this thread's buffers. */
static void multiply(tile t, long rows, long panels) {
    const float *a = t.a;
    const float *b = t.b;
    float *c = t.c;
    const long height = tile_height(rows), panel_stride = t.panel_stride;
    for (long panel = 0; panel < panels; panel++) {
        t.b = b + panel * panel_stride;
        for (long r = 0; r < rows; r += height) {
            t.a = a + r * t.a_stride;
            t.c = c + r * t.c_stride + panel * NR;
            run_panel_tile(&t, (int)MIN(height, rows - r), 0);
        }
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
    static _Thread_local prefill_buffers *buffers;
    if (!buffers && posix_memalign((void **)&buffers, 64, sizeof *buffers) != 0) abort();
    prefill_buffers *b = buffers;

    for (long r = 0; r < rows; r++) {
        const float *from = job->q + ((first_token + r / group) * s->num_heads + work->kv_head * group + r % group) * dim;
        for (long d = 0; d < dim; d++) b->q[r * dim + d] = from[d] * s->scale;
        b->maximum[r] = -INFINITY;
        b->sum[r] = 0;
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
}

static void attend(void *context, long index) {
    const attention_job *job = context;
    const item *work = &job->items[index];
    if (job->query_starts[work->seq + 1] - job->query_starts[work->seq] == 1) decode_item(job, work);
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
