// Compiled for processors with these instructions; g++ lexes a file before it reads the pragma, so XXH_VECTOR is named.
#if defined(__x86_64__)
#pragma GCC target("avx2")
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#define XXH_VECTOR 2
#define DET_LEAF digest_leaf_avx2
#include "digest_leaf.h"
#endif
