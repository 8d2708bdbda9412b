// Host memory -> 64 bits, as digest/host.py does it (DIGEST_VERSION 1). XXH3 comes from the header that pyarrow brings.
#pragma once
#define XXH_INLINE_ALL
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "xxhash.h"

namespace det {

constexpr size_t kBlockBytes = 1024;
constexpr size_t kLeafBytes = 256 * 1024;

// The digest of at most one leaf, zero-padded to whole blocks.
inline uint64_t digest_leaf(const char* bytes, size_t num_bytes) {
  static const char padding[kBlockBytes] = {};
  const size_t tail = num_bytes % kBlockBytes;
  if (tail == 0) return XXH3_64bits(num_bytes == 0 ? padding : bytes, num_bytes);
  if (num_bytes < kBlockBytes) {
    char block[kBlockBytes] = {};
    std::memcpy(block, bytes, num_bytes);
    return XXH3_64bits(block, kBlockBytes);
  }
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, bytes, num_bytes);
  XXH3_64bits_update(&state, padding, kBlockBytes - tail);
  return XXH3_64bits_digest(&state);
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
