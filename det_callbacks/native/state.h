// What the native recorder knows: names of Python's attributes, and copies of what Python has found out about ops,
// layouts and calls.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "python.h"

namespace det {

struct Names {
#define DET_NAMES(X)                                                                                            \
  X(at) X(likely) X(native) X(func) X(phase) X(scope) X(shared) X(last_step) X(step_number) X(consts)           \
  X(names) X(read_labels) X(num_outputs) X(labels) X(start) X(stop) X(number_indices) X(numbers_bits)           \
  X(numbers_tag) X(previous) X(num_digested) X(num_views) X(counts) X(nodes) X(every) X(is_used)                \
  X(is_invalidated) X(pins) X(known) X(_begins) X(digests) X(layout_indices) X(frombytes) X(index) X(tags)      \
  X(is_dense) X(num_bytes) X(op_base) X(scopes) X(current) X(backward_pass) X(skipped)                          \
  X(match_and_store_numbers) X(register) X(backward) X(optimizer) X(forward)
#define DET_MEMBER(name) PyObject* name##_ = PyUnicode_InternFromString(#name);
  DET_NAMES(DET_MEMBER)
#undef DET_MEMBER
#undef DET_NAMES
};

inline const Names& names() {
  static const Names* all = new Names();
  return *all;
}

// What is known of a layout: its slot in Python's table.
struct Slot {
  int64_t index;
  bool is_dense;
  size_t num_bytes;
};

struct HashOfKey {
  size_t operator()(const std::vector<int64_t>& key) const {
    size_t hash = key.size();
    for (const int64_t number : key) hash = (hash ^ static_cast<size_t>(number)) * 0x9E3779B97F4A7C15ull;
    return hash ^ (hash >> 32);
  }
};

// An op as one recorder records it: what Python has found in its schema and its tables.
struct Op {
  PyObject* func = nullptr;  // kept alive forever, as torch does
  bool is_view = false;
  bool is_functional = false;
  Ref skipped_as;                   // of an op without tensors: the reason under which its calls are counted
  std::vector<int64_t> writes;      // arguments that it writes
  std::vector<int64_t> conditions;  // for each, the argument that the write requires, or -1
  std::vector<int64_t> fresh;       // returns that alias no argument
};

// A node of Python's call graph, as it is compared with the next call.
struct Call {
  const Op* op = nullptr;
  Ref phase, scope, names, shared;  // the node's own, which it keeps
  Arguments arguments;
  Ref consts;  // the list that ``arguments`` agrees with; Python replaces it where numbers change
  std::vector<int64_t> read_labels;
  std::vector<int64_t> numbers;  // indices among the constants
  int64_t num_outputs = 0;
  int64_t first_label = 0;
  int64_t num_labels = 0;
};

// The objects of one step's recorder, while its mode is open.
struct Bound {
  enum {
    kStep, kGraph, kLedger, kWriters, kDeferred, kLayouts, kPlaces, kModules, kBackward, kThreads, kTensorNames,
    kParameterNames, kElsewhere, kCaptures, kRegions, kHooks, kAcquire, kRelease, kIntern, kWriteBytes, kDigestMemory,
    kOfAccumulation, kDtypes, kRunBackward, kTensor, kParameter, kCount
  };
  Ref all;
  std::array<PyObject*, kCount> each;

  explicit Bound(PyObject* objects) : all(Ref::of(objects)) {
    for (int i = 0; i < kCount; i++) each[i] = PyTuple_GetItem(objects, i);
  }
  PyObject* operator[](int index) const { return each[index]; }

  // What a step begins anew, its labels last.
  Ref labels, step_number, indices, counts, add_digests;

  void find_step() {
    const auto& n = names();
    Ref current = attribute(each[kGraph], n.labels_);
    if (current.get() == labels.get()) return;
    step_number = attribute(each[kGraph], n.step_number_);
    indices = attribute(each[kStep], n.layout_indices_);
    counts = attribute(each[kStep], n.counts_);
    add_digests = attribute(attribute(each[kStep], n.digests_).get(), n.frombytes_);
    labels = std::move(current);
  }
};

struct Recorder {
  std::atomic<PyObject*> mode{nullptr};
  std::shared_ptr<Bound> bound;  // null while no step is recorded; a call in another thread may outlive it
  std::unordered_map<const void*, Op> ops;  // by schema
  std::vector<std::unique_ptr<Call>> calls;
  int64_t generation = -1;         // of Python's call graph
  int64_t layouts_generation = -1;  // of its layouts
  std::unordered_map<std::vector<int64_t>, Slot, HashOfKey> slots;
  std::vector<int64_t> key;  // of the slot that is looked up
  int64_t num_native = 0;
  int64_t num_python = 0;
};

}  // namespace det
