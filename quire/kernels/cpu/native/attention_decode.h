/* One new token, or a few (drafts): rows of queries, those of one KV head's query heads, over a chunk of keys and values, which
 * are read where they lie; and the merging of chunks. */
#ifndef QUIRE_ATTENTION_DECODE_H
#define QUIRE_ATTENTION_DECODE_H

#include "attention.h"

enum {
    ROW_TILE = (int)MR < 4 ? (int)MR : 4, /* rows at once */
    PANEL_VECTORS = KEY_PANEL / VL,
#if defined(__AVX512F__) || defined(__aarch64__)
    SUMS = 16, /* vectors of scores at once: enough to hide the multipliers' latency, and room for operands */
#else
    SUMS = 8,
#endif
    MOST_PANELS = 4,
};

/* Panels of keys that are scored at once. */
INLINE int panels_at_once(int rows) { return MAX(1, MIN(MOST_PANELS, SUMS / (rows * PANEL_VECTORS))); }

/* The scores of some panels of keys: each sum runs along the head in order, in one accumulator, as those of a prompt do. */
INLINE void dots(int rows, int panels, int kind, const float *q, const char *const *keys, const char *const *values, int ahead,
                 long dim, float *scores) {
    vf acc[ROW_TILE][MOST_PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int j = 0; j < PANEL_VECTORS; j++) acc[r][p][j] = (vf){0};
    const long step = KEY_PANEL * kind_bytes(kind);
    for (long pair = 0; pair < dim; pair += 2) {
        /* Blocks lie anywhere, so no hardware stream finds the next one; values wait in L2 until their turn. */
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
            for (long line = 0; line < 2 * step; line += 64) {
                __builtin_prefetch(keys[p + ahead] + pair * step + line);
                __builtin_prefetch(values[p] + pair * step + line, 0, 2);
            }
#pragma GCC unroll 2
        for (long d = pair; d < pair + 2; d++) {
            vf columns[MOST_PANELS][PANEL_VECTORS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
                for (int j = 0; j < PANEL_VECTORS; j++) columns[p][j] = load_wide(kind, keys[p] + d * step, j * VL);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const float x = q[r * dim + d];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
                    for (int j = 0; j < PANEL_VECTORS; j++) acc[r][p][j] += x * columns[p][j];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++)
#pragma GCC unroll 4
            for (int j = 0; j < PANEL_VECTORS; j++) store(scores + r * CHUNK_STRIDE + p * KEY_PANEL + j * VL, acc[r][p][j]);
}

/* keys and values: of each panel; behind the last one of `keys` lie as many more as are scored at once. */
INLINE void score_panels(int rows, int kind, const float *q, const char *const *keys, const char *const *values, long count,
                         long dim, float *scores) {
    const int at_once = panels_at_once(rows);
    long p = 0;
    for (; p + at_once <= count; p += at_once) dots(rows, at_once, kind, q, keys + p, values + p, at_once, dim, scores + p * KEY_PANEL);
    for (; p < count; p++) dots(rows, 1, kind, q, keys + p, values + p, 0, dim, scores + p * KEY_PANEL);
}

/* sums[rows][dim] = weights[rows][begin .. end) * V; `values` has the rows of each `unit` keys from key 0 on. */
INLINE void weigh(int rows, int vectors, int kind, const float *weights, const char *const *values, long unit, long begin,
                  long end, long dim, long d, float *sums, long row_floats) {
    vf acc[ROW_TILE][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) acc[r][j] = (vf){0};
    for (long first = begin / unit * unit; first < end; first += unit) {
        const long from = MAX(begin, first), to = MIN(first + unit, end);
        const char *v = values[first / unit] + ((from - first) * dim + d) * kind_bytes(kind);
        for (long key = from; key < to; key++, v += dim * kind_bytes(kind)) {
            vf columns[4];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) columns[j] = load_wide(kind, v, j * VL);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const float x = weights[r * CHUNK_STRIDE + key];
#pragma GCC unroll 4
                for (int j = 0; j < vectors; j++) acc[r][j] += x * columns[j];
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) store(sums + r * row_floats + d + j * VL, acc[r][j]);
}

INLINE void weigh_values(int rows, int kind, const float *weights, const char *const *values, long unit, long begin, long end,
                         long dim, float *sums, long row_floats) {
    long d = 0;
    for (; d + 4 * VL <= dim; d += 4 * VL) weigh(rows, 4, kind, weights, values, unit, begin, end, dim, d, sums, row_floats);
    for (; d < dim; d += VL) weigh(rows, 1, kind, weights, values, unit, begin, end, dim, d, sums, row_floats);
}

/* Runs `statement` with `rows` a constant. */
#define FOR_ROWS(value, statement)                                                                                     \
    switch (value) {                                                                                                   \
    case 1: { enum { rows = 1 }; statement; } break;                                                                   \
    case 2: { enum { rows = 2 }; statement; } break;                                                                   \
    case 3: { enum { rows = 3 }; statement; } break;                                                                   \
    default: { enum { rows = ROW_TILE }; statement; } break;                                                           \
    }

static void score_keys(int of_kind, int num_rows, const float *q, const char *const *keys, const char *const *values, long count,
                       long dim, float *scores) {
    FOR_KIND(of_kind, FOR_ROWS(num_rows, score_panels(rows, kind, q, keys, values, count, dim, scores)))
}

static void add_values(int of_kind, int num_rows, const float *weights, const char *const *values, long unit, long begin, long end,
                       long dim, float *sums, long row_floats) {
    FOR_KIND(of_kind, FOR_ROWS(num_rows, weigh_values(rows, kind, weights, values, unit, begin, end, dim, sums, row_floats)))
}

/* Keys [work->begin, work->end) for the new tokens of one sequence, to partial results or, if they are all, to the output. */
static void decode_item(const attention_job *job, const item *work) {
    const attention_spec *s = &job->spec;
    const long dim = job->dim, unit = panel_keys(s->block_size), row_floats = job->row_floats, group = job->group;
    const long first_token = job->query_starts[work->seq], tokens = new_tokens(job, work->seq), num_rows = tokens * group;
    const long first_position = job->kv_lens[work->seq] - tokens, first_head = work->kv_head * group;
    const long chunk = work->begin / CHUNK * CHUNK, first = work->begin / unit * unit, begin = work->begin - chunk, end = work->end - chunk;
    const int kind = (int)s->kv_kind, are_small = unit < KEY_PANEL; /* then a vector's keys lie in several blocks */
    _Alignas(64) float scores[ROW_TILE * CHUNK_STRIDE], q[ROW_TILE * MAX_DIM], wide[KEY_PANEL * MAX_DIM], own[ROW_TILE * MAX_ROW_FLOATS];
    const char *keys[CHUNK / KEY_PANEL + MOST_PANELS], *values[CHUNK / 4];
    long num_panels = 0;
    for (long key = first; key < work->end; key += unit) {
        values[(key - chunk) / unit] = kv_from(job, work->seq, work->kv_head, key, 1);
        if (!are_small) keys[num_panels++] = kv_from(job, work->seq, work->kv_head, key, 0);
    }
    if (are_small) keys[num_panels++] = (const char *)wide;
    for (long i = 0; i < MOST_PANELS; i++) keys[num_panels + i] = keys[num_panels - 1];
    const long tiles = (num_rows + ROW_TILE - 1) / ROW_TILE, height = (num_rows + tiles - 1) / tiles;
    for (long row = 0; row < num_rows; row += height) {
        const int rows = (int)MIN(height, num_rows - row);
        float *sums = work->partial < 0 ? own : job->partials + (work->partial + row) * row_floats;
        for (int r = 0; r < rows; r++) scale_query(job, first_token + (row + r) / group, first_head + (row + r) % group, q + r * dim);
        if (!are_small) score_keys(kind, rows, q, keys, values + (first - chunk) / unit, num_panels, dim, scores + (first - chunk));
        for (long key = first; key < work->end && are_small; key += KEY_PANEL) {
            widen_keys(job, work, key, key, MIN(key + KEY_PANEL, work->end), wide, KEY_PANEL);
            score_keys(F32, rows, q, keys, keys, 1, dim, scores + (key - chunk));
        }
        for (int r = 0; r < rows; r++)
            weights_of_row(job, scores + r * CHUNK_STRIDE, first_head + (row + r) % group, first_position + (row + r) / group, chunk,
                           begin, end, sums + r * row_floats + job->wide_dim);
        add_values(kind, rows, scores, values, unit, begin, end, dim, sums, row_floats);
        for (int r = 0; r < rows && work->partial < 0; r++)
            finish_row(job, sums + r * row_floats, first_token + (row + r) / group, first_head + (row + r) % group);
    }
}

/* The chunks of one sequence and KV head, from its first one's item on. */
static void merge_chunks(const attention_job *job, const item *work) {
    const long group = job->group, num_rows = new_tokens(job, work->seq) * group, row_floats = job->row_floats;
    for (long r = 0; r < num_rows; r++) {
        float *row = job->partials + (work->partial + r) * row_floats;
        for (long c = 1; c < work->num_chunks; c++) add_chunk(row, row + c * num_rows * row_floats, job->wide_dim);
        finish_row(job, row, job->query_starts[work->seq] + r / group, work->kv_head * group + r % group);
    }
}

#endif
