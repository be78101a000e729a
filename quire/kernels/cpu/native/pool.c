/* Why not OpenMP: torch brings its own runtime, and two runtimes' spinning threads fight over the same cores.
 *
 * A job is (body, context, num_items) plus one atomic, `unclaimed`. A thread owns an item once its compare-and-swap has
 * lowered `unclaimed`, and only then reads the job: the caller cannot post another job before that item is done. So a
 * worker that wakes late, or not at all, never delays the others, and never sees half a job. */
#include "pool.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

enum { SPIN_NANOSECONDS = 50 * 1000, SPINS_PER_CLOCK_READ = 64, SPINS_BEFORE_YIELD = 4096 };

struct quire_pool {
    _Alignas(64) atomic_long unclaimed;
    _Alignas(64) atomic_long unfinished;
    _Alignas(64) atomic_int sleepers;
    atomic_int stop;
    quire_item body;
    void *context;
    long num_items;
    int num_workers; /* threads besides the caller */
    int started;
    long fork_count; /* of the process that started the workers */
    pthread_t *workers;
    pthread_mutex_t caller; /* held by the thread whose job it is */
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

/* A forked child has none of the workers: the count tells it to start its own. */
static long fork_count;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static void count_fork(void) { fork_count++; }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long now_nanoseconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void run_items(quire_pool *pool) {
    long left = atomic_load_explicit(&pool->unclaimed, memory_order_acquire);
    while (left > 0) {
        if (!atomic_compare_exchange_weak_explicit(&pool->unclaimed, &left, left - 1, memory_order_acq_rel,
                                                   memory_order_acquire))
            continue;
        pool->body(pool->context, pool->num_items - left);
        atomic_fetch_sub_explicit(&pool->unfinished, 1, memory_order_release);
        left = atomic_load_explicit(&pool->unclaimed, memory_order_acquire);
    }
}

/* True once there is work, false when it is time to sleep. */
static int spin_for_work(quire_pool *pool) {
    long deadline = 0;
    for (unsigned spins = 0;; spins++) {
        if (atomic_load_explicit(&pool->unclaimed, memory_order_relaxed) > 0) return 1;
        if (spins % SPINS_PER_CLOCK_READ == 0) {
            long now = now_nanoseconds();
            if (deadline == 0) deadline = now + SPIN_NANOSECONDS;
            if (now >= deadline) return 0;
        }
        relax();
    }
}

static void *work(void *argument) {
    quire_pool *pool = argument;
    for (;;) {
        run_items(pool);
        if (spin_for_work(pool)) continue;
        pthread_mutex_lock(&pool->mutex);
        atomic_fetch_add(&pool->sleepers, 1);
        while (atomic_load(&pool->unclaimed) == 0 && !atomic_load(&pool->stop))
            pthread_cond_wait(&pool->wake, &pool->mutex);
        atomic_fetch_sub(&pool->sleepers, 1);
        pthread_mutex_unlock(&pool->mutex);
        if (atomic_load(&pool->stop)) return NULL;
    }
}

static void start_workers(quire_pool *pool) {
    atomic_init(&pool->unclaimed, 0);
    atomic_init(&pool->unfinished, 0);
    atomic_init(&pool->sleepers, 0);
    atomic_init(&pool->stop, 0);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->fork_count = fork_count;
    pool->started = 0;
    for (int i = 0; i < pool->num_workers; i++) {
        if (pthread_create(&pool->workers[i], NULL, work, pool) != 0) break; /* fewer threads: slower, not wrong */
        pool->started++;
    }
}

quire_pool *quire_pool_new(int num_threads) {
    pthread_once(&fork_once, watch_forks);
    quire_pool *pool = NULL;
    if (posix_memalign((void **)&pool, 64, sizeof *pool) != 0) return NULL;
    pool->num_workers = num_threads - 1;
    pool->workers = calloc((size_t)num_threads, sizeof *pool->workers);
    pthread_mutex_init(&pool->caller, NULL);
    start_workers(pool);
    return pool;
}

void quire_pool_free(quire_pool *pool) {
    if (pool->fork_count == fork_count) {
        pthread_mutex_lock(&pool->mutex);
        atomic_store(&pool->stop, 1);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
        for (int i = 0; i < pool->started; i++) pthread_join(pool->workers[i], NULL);
    }
    free(pool->workers);
    free(pool);
}

int quire_pool_threads(const quire_pool *pool) { return pool->num_workers + 1; }

void quire_parallel(quire_pool *pool, long num_items, quire_item body, void *context) {
    if (pool->fork_count != fork_count) {
        pthread_mutex_init(&pool->caller, NULL);
        start_workers(pool);
    }
    if (num_items <= 1 || pool->started == 0 || pthread_mutex_trylock(&pool->caller) != 0) {
        for (long i = 0; i < num_items; i++) body(context, i);
        return;
    }
    pool->body = body;
    pool->context = context;
    pool->num_items = num_items;
    atomic_store_explicit(&pool->unfinished, num_items, memory_order_relaxed);
    atomic_store(&pool->unclaimed, num_items);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    run_items(pool);
    for (unsigned spins = 1; atomic_load_explicit(&pool->unfinished, memory_order_acquire) > 0; spins++) {
        if (spins % SPINS_BEFORE_YIELD == 0) sched_yield(); /* the worker may be waiting for this very core */
        relax();
    }
    pthread_mutex_unlock(&pool->caller);
}
