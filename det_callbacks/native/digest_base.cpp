#include <cstddef>
#include <cstdint>
#define DET_LEAF digest_leaf_base
#include "digest_leaf.h"
