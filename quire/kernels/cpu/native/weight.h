/* A matrix as Python holds it: see kernels/cpu/weight.py. */
#ifndef QUIRE_WEIGHT_H
#define QUIRE_WEIGHT_H

#include "quantized.h"

/* Rows of one kind: either all are plain, in one part, or each part is packed, as its tensor of the file is. Every part has
 * panels of its own. */
typedef struct {
    void *data;
    int64_t kind, first_row, num_rows;
} part;

typedef struct {
    const part *parts;
    int64_t num_parts;
    const float *scale; /* [n + NR], int8 only: one scale an output, applied to the finished sum */
    const float *bias;  /* [n + NR]; zeros or NULL where the layer has none: NULL only without scale */
    int64_t n, k;
    int64_t exact; /* packed weights are multiplied as float32, not by activations in 8 bits */
} weight;

INLINE long part_panels(const part *p) { return (p->num_rows + NR - 1) / NR; }

/* k: with packed kinds, where a block starts. */
INLINE const char *panel_at(const weight *w, const part *p, long panel, long k) {
    const int kind = (int)p->kind;
    if (is_quantized(kind)) return (const char *)p->data + (panel * w->k + k) / kind_block(kind) * block_bytes(kind);
    return (const char *)p->data + (panel * w->k + k) * NR * kind_bytes(kind);
}

#endif
