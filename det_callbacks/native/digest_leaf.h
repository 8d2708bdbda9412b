// DET_LEAF: the digest of a leaf, compiled by each of digest_*.cpp for its instructions. XXH3 is that of the header
// that pyarrow brings. Nothing here may be a function that the linker could share with code for other processors.
#define XXH_INLINE_ALL
#include "xxhash.h"

namespace det {

uint64_t DET_LEAF(const char* bytes, size_t num_bytes) {
  constexpr size_t kBlockBytes = 1024;
  static const char padding[kBlockBytes] = {};
  const size_t tail = num_bytes % kBlockBytes;
  if (tail == 0) return XXH3_64bits(num_bytes == 0 ? padding : bytes, num_bytes);
  if (num_bytes < kBlockBytes) {
    char block[kBlockBytes] = {};
    __builtin_memcpy(block, bytes, num_bytes);
    return XXH3_64bits(block, kBlockBytes);
  }
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, bytes, num_bytes);
  XXH3_64bits_update(&state, padding, kBlockBytes - tail);
  return XXH3_64bits_digest(&state);
}

}  // namespace det
