// Compiled for processors with these instructions; g++ lexes a file before it reads the pragma, so XXH_VECTOR is named.
#if defined(__x86_64__)
#pragma GCC target("avx512f")
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#define XXH_VECTOR 3
#define DET_LEAF digest_leaf_avx512
#include "digest_leaf.h"
#endif
