/* Which of the builds of the kernels this processor can run. */
#include <string.h>

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
