/* Which of the builds of the kernels this processor can run, and what of its caches they depend on. */
#include <string.h>
#include <unistd.h>

/* Whether what a core reads in the next 8 KB may wait in its L1. Zen 5, which has 48 KB, reads packed weights a fifth faster
 * so; with Zen 4's 32 KB it is a quarter slower. Not known of other makers' processors of that size. */
int quire_has_large_l1;

static __attribute__((constructor)) void look_at_caches(void) {
#if defined(__x86_64__) && defined(_SC_LEVEL1_DCACHE_SIZE)
    __builtin_cpu_init();
    quire_has_large_l1 = __builtin_cpu_is("amd") && sysconf(_SC_LEVEL1_DCACHE_SIZE) >= 48 << 10;
#endif
}

int quire_isa_runs(const char *name) {
    if (strcmp(name, "generic") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const int has_vnni = __builtin_cpu_supports("avx512vnni");
    if (strcmp(name, "avx512") == 0 || (strcmp(name, "avx512vnni") == 0 && has_vnni))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
    return 0;
}

/* Changes whenever a source file does, so that a stale library is noticed instead of called with new arguments. */
const char *quire_source_hash(void) { return QUIRE_SOURCE_HASH; }
