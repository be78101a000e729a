/* A product and what always follows it, in one call: at one row, crossing from Python costs as much as a small product.
 * `scratch` takes the product's result. */
#include "pool.h"
#include "simd.h"

void EXPORT(linear)(quire_pool *pool, const void *weight, const float *x, float *out, int64_t rows);
void EXPORT(add_rms_norm)(quire_pool *pool, const float *x, float *residual, const float *weight, float *out,
                          int64_t rows, int64_t width, float eps);
void EXPORT(act_mul)(quire_pool *pool, const float *gate_up, float *out, int64_t rows, int64_t width,
                     int64_t activation);
void EXPORT(rope_and_write)(quire_pool *pool, const int64_t *shape, const float *qkv, const float *cos_sin, void *kv,
                            const int64_t *positions, const int64_t *slots, float *q, const float *q_norm,
                            const float *k_norm, float eps, int64_t tokens);

void EXPORT(linear_add_norm)(quire_pool *pool, const void *weight, const float *x, float *scratch, float *residual,
                             const float *norm, float *out, int64_t rows, int64_t width, float eps) {
    EXPORT(linear)(pool, weight, x, scratch, rows);
    EXPORT(add_rms_norm)(pool, scratch, residual, norm, out, rows, width, eps);
}

/* width is that of the result: half the product's. */
void EXPORT(linear_act)(quire_pool *pool, const void *weight, const float *x, float *scratch, float *out, int64_t rows,
                        int64_t width, int64_t activation) {
    EXPORT(linear)(pool, weight, x, scratch, rows);
    EXPORT(act_mul)(pool, scratch, out, rows, width, activation);
}

void EXPORT(linear_rope_write)(quire_pool *pool, const void *weight, const float *x, float *scratch,
                               const int64_t *shape, const float *cos_sin, void *kv, const int64_t *positions,
                               const int64_t *slots, float *q, const float *q_norm, const float *k_norm, float eps,
                               int64_t tokens) {
    EXPORT(linear)(pool, weight, x, scratch, tokens);
    EXPORT(rope_and_write)(pool, shape, scratch, cos_sin, kv, positions, slots, q, q_norm, k_norm, eps, tokens);
}
