/* Layers of a decoder in one call: see kernels/cpu/stack.py. */
#include "pool.h"
#include "simd.h"

void EXPORT(linear_rope_write)(quire_pool *pool, const void *weight, const float *x, float *scratch,
                               const int64_t *shape, const float *cos_sin, void *kv, const int64_t *positions,
                               const int64_t *slots, float *q, const float *q_norm, const float *k_norm, float eps,
                               int64_t tokens);
void EXPORT(attention)(quire_pool *pool, const void *spec, const void *kv, const float *q, float *out,
                       const int32_t *query_starts, const int32_t *kv_lens, const int32_t *tables, int64_t table_width,
                       int64_t num_seqs);
void EXPORT(linear_add_norm)(quire_pool *pool, const void *weight, const float *x, float *scratch, float *residual,
                             const float *norm, float *out, int64_t rows, int64_t width, float eps);
void EXPORT(linear_act)(quire_pool *pool, const void *weight, const float *x, float *scratch, float *out, int64_t rows,
                        int64_t width, int64_t activation);

typedef struct {
    const void *qkv, *output, *gate_up, *down, *spec;
    void *kv;
    const float *cos_sin, *q_norm, *k_norm, *mlp_norm, *next_norm;
    int64_t activation, group, width, q_width, inner;
    float head_eps, mlp_eps, next_eps;
} layer;

typedef struct {
    const int64_t *positions, *slots;
    const int32_t *query_starts, *kv_lens, *tables;
    int64_t table_width;
} batch;

/* batches: one a KV group. x: what the first layer's norm left, and in the end what the norm after the last one leaves. */
void EXPORT(layers)(quire_pool *pool, const layer *layers, int64_t num_layers, const batch *batches, float *x,
                    float *residual, float *buffer, float *scratch, int64_t tokens, int64_t num_seqs) {
    for (const layer *l = layers; l < layers + num_layers; l++) {
        const batch *b = batches + l->group;
        float *q = buffer, *attended = buffer + tokens * l->q_width, *gated = buffer;
        EXPORT(linear_rope_write)(pool, l->qkv, x, scratch, l->spec, l->cos_sin, l->kv, b->positions, b->slots, q, l->q_norm,
                                  l->k_norm, l->head_eps, tokens);
        EXPORT(attention)(pool, l->spec, l->kv, q, attended, b->query_starts, b->kv_lens, b->tables, b->table_width, num_seqs);
        EXPORT(linear_add_norm)(pool, l->output, attended, scratch, residual, l->mlp_norm, x, tokens, l->width, l->mlp_eps);
        EXPORT(linear_act)(pool, l->gate_up, x, scratch, gated, tokens, l->inner, l->activation);
        EXPORT(linear_add_norm)(pool, l->down, gated, scratch, residual, l->next_norm, x, tokens, l->width, l->next_eps);
    }
}
