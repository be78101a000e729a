/* A small thread pool: one job at a time, split into numbered items that idle threads claim. */
#ifndef QUIRE_POOL_H
#define QUIRE_POOL_H

#include <stddef.h>

typedef struct quire_pool quire_pool;
typedef void (*quire_item)(void *context, long item);

/* Runs body(context, 0 .. num_items - 1) over the pool's threads and the caller's; returns when all are done.
 * A second caller at the same time (another engine's thread) runs its items alone. */
void quire_parallel(quire_pool *pool, long num_items, quire_item body, void *context);

int quire_pool_threads(const quire_pool *pool);

#endif
