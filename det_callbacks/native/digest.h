// Host memory -> 64 bits, as digest/host.py does it (DIGEST_VERSION 1).
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace det {

constexpr size_t kLeafBytes = 256 * 1024;

// The digest of at most one leaf, zero-padded to blocks of 1,024 bytes: for any processor, or for those with these
// instructions.
uint64_t digest_leaf_base(const char* bytes, size_t num_bytes);
uint64_t digest_leaf_avx2(const char* bytes, size_t num_bytes);
uint64_t digest_leaf_avx512(const char* bytes, size_t num_bytes);

inline uint64_t digest_leaf(const char* bytes, size_t num_bytes) {
#if defined(__x86_64__)
  static const auto fastest = __builtin_cpu_supports("avx512f") ? &digest_leaf_avx512
                              : __builtin_cpu_supports("avx2")  ? &digest_leaf_avx2
                                                                : &digest_leaf_base;
  return fastest(bytes, num_bytes);
#else
  return digest_leaf_base(bytes, num_bytes);
#endif
}

inline uint64_t digest_memory(const char* bytes, size_t num_bytes) {
  if (num_bytes <= kLeafBytes) return digest_leaf(bytes, num_bytes);
  std::vector<uint64_t> leaves;
  for (size_t first = 0; first < num_bytes; first += kLeafBytes) {
    leaves.push_back(digest_leaf(bytes + first, std::min(kLeafBytes, num_bytes - first)));
  }
  return digest_memory(reinterpret_cast<const char*>(leaves.data()), leaves.size() * sizeof(uint64_t));
}

}  // namespace det
