// A dispatch mode whose dispatch is C++. A call that the step is likely to make next is recorded here, on the ledger
// that Python keeps; any other call goes to Python, before anything of it has run, and Python teaches what it recorded.
//
// The GIL guards everything here, apart from the kernel's own run. It is never held while a kernel runs.
#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else  // torch 2.11
#include <torch/csrc/autograd/function.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "arguments.h"
#include "digest.h"
#include "proxy.h"
#include "python.h"

#define DET_EXPORT extern "C" __attribute__((visibility("default")))

namespace det {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::impl::TorchDispatchModeTLS;
using torch::jit::Stack;

constexpr int kEqual = 2;  // Py_EQ
constexpr char kAlert[] = "does not have a deterministic implementation";
constexpr size_t kThreadedBytes = 16 * 1024 * 1024;  // Python digests more than this in two threads

struct Names {
#define DET_NAMES(X)                                                                                              \
  X(at) X(likely) X(native) X(func) X(phase) X(scope) X(shared) X(last_step) X(step_number) X(consts) X(names)    \
  X(read_labels) X(num_outputs) X(labels) X(start) X(stop) X(number_indices) X(numbers_bits) X(numbers_tag) X(previous)   \
  X(num_digested) X(num_views) X(counts) X(nodes) X(every) X(is_used) X(is_invalidated) X(pins) X(known) X(_begins) \
  X(digests) X(layout_indices) X(frombytes) X(index) X(tags) X(is_dense) X(num_bytes) X(op_base) X(scopes)        \
  X(current) X(backward_pass) X(skipped) X(match_and_store_numbers) X(register) X(backward) X(optimizer) X(forward) X(writes)
#define DET_MEMBER(name) PyObject* name##_ = PyUnicode_InternFromString(#name);
  DET_NAMES(DET_MEMBER)
#undef DET_MEMBER
#undef DET_NAMES
};

const Names& names() {
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

// The recorders whose modes are open. Threads of the autograd engine read it without the GIL.
constexpr size_t kMaxOpen = 8;
std::atomic<Recorder*> open_recorders[kMaxOpen];

const PyInterpreterVTable* real = nullptr;
c10::impl::PyInterpreter* interpreter = nullptr;

// The call that Python records at the moment, in this thread.
struct Delegated {
  Recorder* recorder;
  const c10::FunctionSchema* schema;
  Arguments arguments;
  bool is_described;
};
thread_local Delegated* delegated = nullptr;

PyObject* object_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj(); }

template <class Function>
void each_tensor(const c10::IValue& value, Function&& function) {
  if (is_defined(value)) {
    function(value.toTensor());
  } else if (value.isList()) {
    for (const auto& item : value.toListRef()) {
      if (is_defined(item)) function(item.toTensor());
    }
  }
}

// Whether the native recorder digests a dtype: those of DTYPES in trace/native.py.
bool is_known_dtype(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Byte:
    case c10::ScalarType::Char:
    case c10::ScalarType::Short:
    case c10::ScalarType::Int:
    case c10::ScalarType::Long:
    case c10::ScalarType::Half:
    case c10::ScalarType::Float:
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexFloat:
    case c10::ScalarType::ComplexDouble:
    case c10::ScalarType::Bool:
    case c10::ScalarType::BFloat16:
      return true;
    default:
      return false;
  }
}

// Whether a tensor is strided elements in the host's memory, without anything that stands for other values.
bool is_plain_impl(const at::Tensor& tensor) {
  static const uint64_t allowed =
      (DispatchKeySet(DispatchKey::CPU) | DispatchKeySet(DispatchKey::ADInplaceOrView) |
       DispatchKeySet(DispatchKey::AutogradCPU) | DispatchKeySet(DispatchKey::AutocastCPU))
          .raw_repr();
  const auto* impl = tensor.unsafeGetTensorImpl();
  return (impl->key_set().raw_repr() & ~allowed) == 0 && impl->has_storage() && impl->layout() == at::kStrided &&
         impl->device_type() == c10::DeviceType::CPU && !impl->has_symbolic_sizes_strides() &&
         is_known_dtype(tensor.scalar_type());
}

// One call that may be the likely one: first compared without any effect, then run, then written to the ledger.
class Attempt {
 public:
  Attempt(Recorder& recorder, const Op& op, const c10::OperatorHandle& handle, Stack& stack)
      : recorder_(recorder), owner_(recorder.bound), bound_(*owner_), op_(op), schema_(handle.schema()), stack_(stack) {
    base_ = stack.size() - schema_.arguments().size();
  }

  // Returns whether the call is the likely one; changes nothing otherwise.
  bool is_likely() {
    if (!is_ordinary_step()) return false;
    bound_.find_step();
    if (op_.skipped_as.get() != nullptr) return true;
    if (op_.is_view) return is_likely_view();
    if (!find_place() || !find_node()) return false;
    call_ = static_cast<Call*>(PyLong_AsVoidPtr(attribute(node_.get(), names().native_).get()));
    if (call_ == nullptr || call_->op != &op_) return false;
    if (call_->scope.get() != scope_.get() || call_->phase.get() != phase_.get()) return false;
    if (!is_unused(call_->shared.get())) return false;
    if (attribute(node_.get(), names().consts_).get() != call_->consts.get()) return false;
    if (!has_known_arguments() || !find_reads() || !find_writes()) return false;
    if (is_forward_) find_parts();
    return changed_.empty() || match_and_store_numbers();
  }

  // Keeps the storages of new inputs, whose digests are taken before the op may write them.
  void before() {
    for (const auto& input : inputs_) {
      pin(input.tensor);
      bits_.push_back(digest(input.tensor, *input.slot));
      indices_.push_back(input.slot->index);
    }
  }

  // Releases what ``before`` kept; nothing else has changed.
  void roll_back() {
    for (auto* storage : pinned_) c10::raw::weak_intrusive_ptr::decref(storage);
    pinned_.clear();
  }

  void after() {
    const auto& n = names();
    if (op_.skipped_as.get() != nullptr) {
      count_skipped(op_.skipped_as.get());
      return;
    }
    if (op_.is_view) {
      after_view();
      return;
    }
    Tensors tensors;
    Values values;
    if (!find_outputs(tensors, values)) {
      give_up(tensors);
      return;
    }
    const Ref own_numbers = call_->numbers.empty() ? Ref() : attribute(node_.get(), n.numbers_bits_);
    int64_t position = first_site_ + static_cast<int64_t>(inputs_.size());
    const bool has_numbers = !call_->numbers.empty() || !values.empty();
    const Ref tags = has_numbers ? attribute(bound_[Bound::kLayouts], n.tags_) : Ref();
    if (!call_->numbers.empty()) {
      const uint64_t bits = PyLong_AsUnsignedLongLong(own_numbers.get());
      if (PyErr_Occurred() != nullptr) throw PythonFailed();
      bits_.push_back(bits);
      indices_.push_back(index_of_tag(tags.get(), attribute(node_.get(), n.numbers_tag_).get()));
      position++;
    }
    c10::SmallVector<const Slot*, 4> slots;
    for (const auto& tensor : tensors) {
      const Slot* slot = slot_of(tensor, parts_);
      if (slot == nullptr) {
        give_up(tensors);
        return;
      }
      slots.push_back(slot);
    }
    for (const auto& [bits, tag] : values) {
      bits_.push_back(bits);
      indices_.push_back(index_of_tag(tags.get(), tag));
    }
    for (size_t i = 0; i < tensors.size(); i++) {
      bits_.push_back(digest(tensors[i], *slots[i]));
      indices_.push_back(slots[i]->index);
    }
    commit_inputs();
    for (size_t i = 0; i < tensors.size(); i++) write(tensors[i], *slots[i], position + static_cast<int64_t>(i));
    append_sites();
    advance();
    increment(bound_.counts.get(), n.num_digested_);
    if (phase_.get() != n.optimizer_ && (!is_backward_ || at::GradMode::is_enabled())) register_node();
  }

 private:
  using Tensors = c10::SmallVector<at::Tensor, 4>;
  using Values = c10::SmallVector<std::pair<uint64_t, PyObject*>, 1>;  // bits and tag of returned numbers

  struct Input {
    at::Tensor tensor;
    const Slot* slot;
  };

  bool is_ordinary_step() {
    const auto& n = names();
    const auto hooks = PyTuple_Size(attribute(bound_[Bound::kHooks], n.every_).get());
    return PySet_Size(bound_[Bound::kCaptures]) == 0 && PyDict_Size(bound_[Bound::kRegions]) == 0 && hooks == 0 &&
           PySet_Size(attribute(bound_[Bound::kElsewhere], n.nodes_).get()) == 0 &&
           !is_true(bound_[Bound::kDeferred], n.is_used_) && !is_true(bound_[Bound::kLedger], n.is_invalidated_);
  }

  // Finds phase and scope, as ``Recorder.op`` does; returns false where Python has to look.
  bool find_place() {
    const auto& n = names();
    const int task = torch::autograd::get_current_graph_task_id();
    is_backward_ = task != -1;
    if (is_backward_) {
      phase_ = Ref::of(n.backward_);
      return int_attribute(bound_[Bound::kModules], n.backward_pass_) != task && find_backward_scope();
    }
    phase_ = attribute(bound_[Bound::kPlaces], n.phase_);
    scope_ = attribute(bound_[Bound::kModules], n.current_);
    is_forward_ = phase_.get() == n.forward_ || PyUnicode_CompareWithASCIIString(phase_.get(), "forward") == 0;
    return true;
  }

  bool find_backward_scope() {
    const auto& n = names();
    if (_frame* frame = PyEval_GetFrame()) {  // code of the program, such as a hook, runs inside the pass
      if (Ref(PyFrame_GetCode(frame)).get() != bound_[Bound::kRunBackward]) return false;
    }
    const auto node = torch::autograd::get_current_node();
    if (!node || at::SavedTensorDefaultHooks::get_hooks(true).has_value()) return false;
    const auto& reference = *node;
    if (typeid(reference) == typeid(torch::autograd::AccumulateGrad)) {
      PyObject* variable = object_of(static_cast<const torch::autograd::AccumulateGrad&>(reference).variable);
      if (variable == nullptr) return false;
      PyObject* name = find(bound_[Bound::kParameterNames], Ref(PyLong_FromVoidPtr(variable)).get());
      if (name == nullptr) return false;
      scope_ = Ref(PyObject_CallFunctionObjArgs(bound_[Bound::kOfAccumulation], name, nullptr));
      return true;
    }
    if (PyDict_Size(bound_[Bound::kThreads]) != 1) return false;
    PyObject* nodes = nodes_of_thread();
    if (nodes == nullptr) return false;
    PyObject* made = find(nodes, Ref(PyLong_FromUnsignedLongLong(node->sequence_nr())).get());
    if (made == nullptr) return false;
    const Ref scopes = attribute(PyList_GetItem(made, 0), n.scopes_);
    if (scopes.is_none()) return false;
    const std::string name = node->name();
    const Ref key(PyUnicode_FromStringAndSize(name.data(), static_cast<intptr_t>(name.size())));
    PyObject* known = find(scopes.get(), key.get());
    if (known == nullptr) return false;
    scope_ = Ref::of(known);
    return true;
  }

  // The calls by autograd node of the running thread, borrowed, or null.
  PyObject* nodes_of_thread() {
    return find(bound_[Bound::kThreads], Ref(PyLong_FromUnsignedLongLong(PyThread_get_thread_ident())).get());
  }

  // Finds the node that is likely next; returns false if there is none.
  bool find_node() {
    at_ = attribute(bound_[Bound::kGraph], names().at_);
    node_ = attribute(at_.get(), names().likely_);
    return !node_.is_none();
  }

  // Keeps the rows of the likely node; returns false if the step has had them.
  bool is_unused(PyObject* shared) {
    shared_ = Ref::of(shared);
    return int_attribute(shared, names().last_step_) != as_int(bound_.step_number.get());
  }

  bool is_likely_view() {
    const auto& n = names();
    for (size_t i = base_; i < stack_.size(); i++) {
      bool are_plain = true;
      each_tensor(stack_[i], [&](const at::Tensor& tensor) { are_plain = are_plain && is_plain(tensor); });
      if (!are_plain) return false;
    }
    has_node_ = at::GradMode::is_enabled() || is_unclaimed();
    if (!has_node_) return true;
    if (!find_place() || !find_node()) return false;
    if (attribute(node_.get(), n.func_).get() != op_.func) return false;
    if (attribute(node_.get(), n.scope_).get() != scope_.get()) return false;
    if (attribute(node_.get(), n.phase_).get() != phase_.get()) return false;
    const Ref shared = attribute(node_.get(), n.shared_);
    const Ref labels = attribute(shared.get(), n.labels_);
    const int has_labels = PyObject_IsTrue(labels.get());
    check(has_labels);
    return has_labels == 0 && is_unused(shared.get());
  }

  bool is_unclaimed() {
    PyObject* nodes = nodes_of_thread();
    return nodes == nullptr || find(nodes, number_of_node().get()) == nullptr;
  }

  static Ref number_of_node() {
    return Ref(PyLong_FromLongLong(static_cast<int64_t>(at::sequence_number::peek()) - 1));
  }

  void after_view() {
    const auto& n = names();
    increment(bound_.counts.get(), n.num_views_);
    if (!has_node_) return;
    advance();
    register_node();
  }

  // Compares the arguments that are no tensors; notes numbers that differ and may.
  bool has_known_arguments() {
    const auto& known = call_->arguments.each;
    const auto& declared = schema_.arguments();
    for (size_t i = 0; i < known.size(); i++) {
      if (!has_kind(known[i], stack_[base_ + i])) return false;
      if (known[i].kind != Argument::kConstant) continue;
      const c10::IValue value = unwrapped(stack_[base_ + i]);
      if (is_same(known[i].constant, value)) continue;
      const auto& usual = declared[i].default_value();
      const bool is_usual = usual.has_value() && *usual == value;
      // without its default value, Python would see another number of arguments
      if (known[i].number < 0 || is_usual || !is_number(value) || !is_number(known[i].constant)) return false;
      if (std::find(call_->numbers.begin(), call_->numbers.end(), known[i].number) == call_->numbers.end()) return false;
      changed_.push_back(i);
    }
    return true;
  }

  bool is_plain(const at::Tensor& tensor) {
    if (!is_plain_impl(tensor)) return false;
    PyObject* object = object_of(tensor);
    if (object == nullptr) return true;
    const Ref type(PyObject_Type(object));
    return type.get() == bound_[Bound::kTensor] || type.get() == bound_[Bound::kParameter];
  }

  // Finds the sites that wrote what the call reads, and whether the node has read the same.
  bool find_reads() {
    PyObject* input_names = call_->names.get();
    first_site_ = PyList_Size(bound_.indices.get());
    size_t num_read = 0;
    bool is_right = true;
    for (size_t i = base_; is_right && i < stack_.size(); i++) {
      each_tensor(stack_[i], [&](const at::Tensor& tensor) {
        is_right = is_right && is_plain(tensor) && read(tensor, input_names, num_read++);
      });
    }
    return is_right && num_read == call_->read_labels.size() &&
           static_cast<intptr_t>(inputs_.size()) == PyList_Size(input_names);
  }

  bool read(const at::Tensor& tensor, PyObject* input_names, size_t at) {
    if (at >= call_->read_labels.size()) return false;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const Ref address(PyLong_FromVoidPtr(storage));
    int64_t label = 0;
    if (PyObject* writer = find(bound_[Bound::kWriters], address.get())) {
      if (!is_int(writer)) return false;  // several sites wrote parts
      PyObject* known = PyList_GetItem(bound_.labels.get(), as_int(writer));
      if (known == nullptr) throw PythonFailed();
      label = as_int(known);
    } else {
      size_t index = 0;
      while (index < inputs_.size() && inputs_[index].tensor.storage().unsafeGetStorageImpl() != storage) index++;
      if (index == inputs_.size() && !add_input(tensor, storage, address.get(), input_names)) return false;
      label = -1 - static_cast<int64_t>(index);
    }
    return label == call_->read_labels[at];
  }

  // Adds an input that no site of the step wrote; it has to cover its storage, and to have the name of the node's.
  bool add_input(const at::Tensor& tensor, c10::StorageImpl* storage, PyObject* address, PyObject* input_names) {
    const Slot* slot = tensor.storage_offset() == 0 ? slot_of(tensor, {}) : nullptr;
    if (slot == nullptr || !slot->is_dense || slot->num_bytes == 0 || slot->num_bytes != storage->nbytes()) return false;
    const void* data = tensor.const_data_ptr();
    if (data == nullptr) return false;
    const Ref start(PyLong_FromVoidPtr(const_cast<void*>(data)));
    const Ref key(PyTuple_Pack(2, address, start.get()));
    const Ref known = attribute(bound_[Bound::kTensorNames], names().known_);
    PyObject* name = find(known.get(), key.get());
    if (name == nullptr) name = &_Py_NoneStruct;
    const auto index = static_cast<intptr_t>(inputs_.size());
    if (index >= PyList_Size(input_names)) return false;
    const int is_equal = PyObject_RichCompareBool(PyList_GetItem(input_names, index), name, kEqual);
    check(is_equal);
    inputs_.push_back(Input{tensor, slot});
    return is_equal != 0;
  }

  // Finds the arguments that the op writes: each has to cover its storage, with one writer.
  bool find_writes() {
    for (size_t i = 0; i < op_.writes.size(); i++) {
      if (op_.conditions[i] >= 0) {
        const auto& given = stack_[base_ + op_.conditions[i]];
        if (given.isNone() || (given.isTensor() && !given.toTensor().defined())) continue;
        if (given.isBool() && !given.toBool()) continue;
      }
      bool is_whole = true;
      each_tensor(stack_[base_ + op_.writes[i]], [&](const at::Tensor& tensor) {
        const Slot* slot = slot_of(tensor, {});
        is_whole = is_whole && slot != nullptr && slot->is_dense && slot->num_bytes > 0 &&
                   slot->num_bytes == tensor.storage().nbytes();
        written_.push_back(tensor);
      });
      if (!is_whole) return false;
    }
    return true;
  }

  // Finds which part of its storage each argument covers, as ``parts_of_arguments`` does.
  void find_parts() {
    const auto& known = call_->arguments.each;
    int64_t at = 0;
    for (size_t i = 0; i < known.size(); i++) {
      const auto& value = stack_[base_ + i];
      if (known[i].kind == Argument::kConstant) {
        if (!known[i].is_default) at += value.isList() ? static_cast<int64_t>(value.toListRef().size()) : 1;
        continue;
      }
      if (known[i].kind == Argument::kTensor) {
        add_part(value.toTensor(), at++);
        continue;
      }
      for (const auto& item : value.toListRef()) {
        if (is_defined(item)) add_part(item.toTensor(), at);
        at++;
      }
    }
  }

  void add_part(const at::Tensor& tensor, int64_t at) {
    const bool is_whole = tensor.is_contiguous();
    const int64_t first = tensor.storage_offset();
    if (first == 0 && is_whole) return;
    const int64_t offset = offset_in_named(tensor);
    if (offset == 0 && is_whole) return;
    parts_.append({at, offset, tensor.dim()});
    parts_.append(tensor.strides().begin(), tensor.strides().end());
  }

  // ``NameTable.offset_in``
  int64_t offset_in_named(const at::Tensor& tensor) {
    const Ref begins = attribute(bound_[Bound::kTensorNames], names()._begins_);
    const Ref storage(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
    PyObject* known = find(begins.get(), storage.get());
    const auto address = reinterpret_cast<int64_t>(tensor.const_data_ptr());
    int64_t begin = -1;
    for (intptr_t i = 0; known != nullptr && i < PyList_Size(known); i++) {
      const int64_t one = as_int(PyList_GetItem(known, i));
      if (one <= address) begin = std::max(begin, one);
    }
    const auto item = static_cast<int64_t>(tensor.element_size());
    return begin < 0 ? tensor.storage_offset() : (address - begin) / item;
  }

  // Lets Python take the numbers that differ from the last time; everything else has been compared.
  bool match_and_store_numbers() {
    const auto& n = names();
    auto& known = call_->arguments.each;
    Ref consts(PySequence_List(call_->consts.get()));
    for (const size_t i : changed_) {
      check(PyList_SetItem(consts.get(), known[i].number, as_python(unwrapped(stack_[base_ + i])).release()));
    }
    const Ref taken(PyObject_CallMethodObjArgs(
        bound_[Bound::kGraph], n.match_and_store_numbers_, node_.get(), consts.get(), nullptr));
    const int is_taken = PyObject_IsTrue(taken.get());
    check(is_taken);
    if (is_taken == 0) return false;
    for (const size_t i : changed_) known[i].constant = unwrapped(stack_[base_ + i]);
    call_->consts = attribute(node_.get(), n.consts_);
    return true;
  }

  // Returns the slot of a layout, or null for a dtype that only Python knows.
  const Slot* slot_of(const at::Tensor& tensor, c10::ArrayRef<int64_t> parts) {
    auto& key = recorder_.key;
    key.assign({static_cast<int64_t>(tensor.scalar_type()), tensor.dim()});
    key.insert(key.end(), tensor.sizes().begin(), tensor.sizes().end());
    key.insert(key.end(), tensor.strides().begin(), tensor.strides().end());
    key.insert(key.end(), parts.begin(), parts.end());
    const auto known = recorder_.slots.find(key);
    if (known != recorder_.slots.end()) return &known->second;
    const auto& n = names();
    const Ref dtype_name(PyUnicode_InternFromString(c10::toString(tensor.scalar_type())));
    PyObject* dtype = find(bound_[Bound::kDtypes], dtype_name.get());
    if (dtype == nullptr) return nullptr;
    const Ref shape = tuple_of(tensor.sizes()), stride = tuple_of(tensor.strides()), flat = tuple_of(parts);
    const Ref slot(PyObject_CallFunctionObjArgs(
        bound_[Bound::kIntern], dtype, shape.get(), stride.get(), flat.get(), nullptr));
    const Slot made{
        int_attribute(slot.get(), n.index_), is_true(slot.get(), n.is_dense_),
        static_cast<size_t>(int_attribute(slot.get(), n.num_bytes_))};
    return &recorder_.slots.emplace(key, made).first->second;
  }

  static Ref tuple_of(c10::ArrayRef<int64_t> numbers) {
    Ref tuple(PyTuple_New(static_cast<intptr_t>(numbers.size())));
    for (size_t i = 0; i < numbers.size(); i++) {
      check(PyTuple_SetItem(tuple.get(), static_cast<intptr_t>(i), Ref(PyLong_FromLongLong(numbers[i])).release()));
    }
    return tuple;
  }

  int64_t index_of_tag(PyObject* tags, PyObject* tag) {
    PyObject* slot = find(tags, tag);
    if (slot == nullptr) throw PythonFailed();
    return int_attribute(slot, names().index_);
  }

  // The digest of a plain tensor, in memory order if it is dense.
  uint64_t digest(const at::Tensor& tensor, const Slot& slot) {
    if (slot.num_bytes == 0) return digest_memory(nullptr, 0);
    if (!slot.is_dense) {
      const c10::impl::ExcludeDispatchKeyGuard no_modes(
          DispatchKeySet(DispatchKey::Python) | DispatchKeySet(DispatchKey::PythonTLSSnapshot) |
          c10::autograd_dispatch_keyset_with_ADInplaceOrView);
      const at::Tensor copy = tensor.contiguous();
      return digest_memory(static_cast<const char*>(copy.const_data_ptr()), copy.nbytes());
    }
    const void* data = tensor.const_data_ptr();
    if (slot.num_bytes < kThreadedBytes) return digest_memory(static_cast<const char*>(data), slot.num_bytes);
    const Ref address(PyLong_FromVoidPtr(const_cast<void*>(data)));
    const Ref size(PyLong_FromUnsignedLongLong(slot.num_bytes));
    const Ref bits(PyObject_CallFunctionObjArgs(bound_[Bound::kDigestMemory], address.get(), size.get(), nullptr));
    const uint64_t found = PyLong_AsUnsignedLongLong(bits.get());
    if (PyErr_Occurred() != nullptr) throw PythonFailed();
    return found;
  }

  // Keeps the address of a storage from being reused until the step ends.
  void pin(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    c10::raw::weak_intrusive_ptr::incref(storage);
    pinned_.push_back(storage);
  }

  // Finds what the call returned and wrote; returns false if that is not what the node has.
  bool find_outputs(Tensors& tensors, Values& values) {
    static PyObject* const kFloat = PyUnicode_InternFromString("float");
    static PyObject* const kInt = PyUnicode_InternFromString("int");
    static PyObject* const kBool = PyUnicode_InternFromString("bool");
    const size_t first = stack_.size() - schema_.returns().size();
    bool is_right = true;
    for (const int64_t index : op_.fresh) {
      const auto& value = stack_[first + index];
      if (value.isDouble()) {
        uint64_t bits = 0;
        const double number = value.toDouble();
        std::memcpy(&bits, &number, sizeof bits);
        values.emplace_back(bits, kFloat);
      } else if (value.isInt()) {
        values.emplace_back(static_cast<uint64_t>(value.toInt()), kInt);
      } else if (value.isBool()) {
        values.emplace_back(value.toBool() ? 1 : 0, kBool);
      } else if (value.isTensor() || value.isTensorList() || value.isList()) {
        each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
      } else if (!value.isNone()) {
        is_right = false;
      }
    }
    tensors.append(written_.begin(), written_.end());
    for (const auto& tensor : tensors) is_right = is_right && is_plain(tensor);
    const bool is_mixed = !values.empty() && (!tensors.empty() || !parts_.empty());
    return is_right && !is_mixed && static_cast<int64_t>(tensors.size() + values.size()) == call_->num_outputs;
  }

  // Leaves a call out whose outputs are not those of the node: the coverage counts it, and later reads of what it wrote
  // are inputs of the step.
  void give_up(const Tensors& tensors) {
    roll_back();
    for (const auto& tensor : tensors) {
      if (!tensor.has_storage()) continue;
      const Ref address(PyLong_FromVoidPtr(tensor.storage().unsafeGetStorageImpl()));
      if (find(bound_[Bound::kWriters], address.get()) != nullptr) check(PyDict_DelItem(bound_[Bound::kWriters], address.get()));
    }
    count_skipped(Ref(PyUnicode_InternFromString("unexpected_output")).get());
  }

  void count_skipped(PyObject* reason) {
    const Ref skipped = attribute(bound_.counts.get(), names().skipped_);
    PyObject* before = find(skipped.get(), reason);
    const int64_t count = before == nullptr ? 0 : as_int(before);
    check(PyDict_SetItem(skipped.get(), reason, Ref(PyLong_FromLongLong(count + 1)).get()));
  }

  void commit_inputs() {
    const Ref pins = attribute(bound_[Bound::kLedger], names().pins_);
    for (size_t i = 0; i < pinned_.size(); i++) {
      const Ref address(PyLong_FromVoidPtr(pinned_[i]));
      check(PyList_Append(pins.get(), address.get()));
      set_writer(address.get(), first_site_ + static_cast<int64_t>(i));
    }
    pinned_.clear();
  }

  void set_writer(PyObject* address, int64_t position) {
    check(PyDict_SetItem(bound_[Bound::kWriters], address, Ref(PyLong_FromLongLong(position)).get()));
  }

  // Records that a site wrote a tensor, as the end of ``Recorder.op`` does.
  void write(const at::Tensor& tensor, const Slot& slot, int64_t position) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    const Ref address(PyLong_FromVoidPtr(storage));
    const bool is_known = find(bound_[Bound::kWriters], address.get()) != nullptr;
    const bool is_whole = slot.is_dense && storage->nbytes() == slot.num_bytes;
    if (op_.is_functional || (is_whole && !is_known && slot.num_bytes > 0)) {
      c10::raw::weak_intrusive_ptr::incref(storage);
      const Ref pins = attribute(bound_[Bound::kLedger], names().pins_);
      check(PyList_Append(pins.get(), address.get()));
      set_writer(address.get(), position);
    } else if (is_whole && is_known) {
      set_writer(address.get(), position);
    } else {
      if (!is_known) {
        c10::raw::weak_intrusive_ptr::incref(storage);
        check(PyList_Append(attribute(bound_[Bound::kLedger], names().pins_).get(), address.get()));
      }
      const Ref total(PyLong_FromUnsignedLongLong(storage->nbytes()));
      const Ref offset(PyLong_FromLongLong(tensor.storage_offset()));
      const Ref item(PyLong_FromUnsignedLongLong(tensor.element_size()));
      const Ref shape = tuple_of(tensor.sizes()), stride = tuple_of(tensor.strides());
      const Ref at(PyLong_FromLongLong(position));
      Ref(PyObject_CallFunctionObjArgs(
          bound_[Bound::kWriteBytes], address.get(), total.get(), offset.get(), item.get(), shape.get(), stride.get(),
          at.get(), nullptr));
    }
  }

  // Appends the digests and layouts of the call's sites.
  void append_sites() {
    const Ref bytes(PyBytes_FromStringAndSize(
        reinterpret_cast<const char*>(bits_.data()), static_cast<intptr_t>(bits_.size() * sizeof(uint64_t))));
    for (const int64_t index : indices_) {
      check(PyList_Append(bound_.indices.get(), Ref(PyLong_FromLongLong(index)).get()));
    }
    Ref(PyObject_CallFunctionObjArgs(bound_.add_digests.get(), bytes.get(), nullptr));
  }

  // ``CallGraph._advance``
  void advance() {
    const auto& n = names();
    PyObject* graph = bound_[Bound::kGraph];
    check(PyObject_SetAttr(node_.get(), n.previous_, at_.get()));
    check(PyObject_SetAttr(shared_.get(), n.last_step_, bound_.step_number.get()));
    if (call_ != nullptr && call_->num_labels > 0) {
      for (int64_t i = 0; i < call_->num_labels; i++) {
        check(PyList_Append(bound_.labels.get(), Ref(PyLong_FromLongLong(call_->first_label + i)).get()));
      }
    }
    check(PyObject_SetAttr(graph, n.at_, node_.get()));
  }

  static void increment(PyObject* object, PyObject* name) {
    check(PyObject_SetAttr(object, name, Ref(PyLong_FromLongLong(int_attribute(object, name) + 1)).get()));
  }

  // ``BackwardMap.register``, which Python runs where hooks or an earlier call at the same number need a closer look.
  void register_node() {
    const auto& n = names();
    PyObject* nodes = nodes_of_thread();
    if (nodes != nullptr && !at::SavedTensorDefaultHooks::get_hooks(true).has_value()) {
      const Ref number = number_of_node();
      PyObject* known = find(nodes, number.get());
      if (known == nullptr) {
        Ref calls(PyList_New(1));
        check(PyList_SetItem(calls.get(), 0, Ref::of(node_.get()).release()));
        check(PyDict_SetItem(nodes, number.get(), calls.get()));
        return;
      }
      PyObject* first = PyList_GetItem(known, 0);
      if (first == node_.get()) return;
      const Ref base = attribute(first, n.op_base_);
      if (PyUnicode_CompareWithASCIIString(base.get(), "aten.clone") != 0) return;
    }
    Ref(PyObject_CallMethodObjArgs(bound_[Bound::kBackward], n.register_, node_.get(), nullptr));
  }

  Recorder& recorder_;
  const std::shared_ptr<Bound> owner_;
  Bound& bound_;
  const Op& op_;
  const c10::FunctionSchema& schema_;
  Stack& stack_;
  size_t base_;
  bool is_backward_ = false;
  bool is_forward_ = false;
  bool has_node_ = true;  // whether a view is registered for the autograd node that it made
  Ref phase_, scope_, at_, node_, shared_;
  Call* call_ = nullptr;
  int64_t first_site_ = 0;
  c10::SmallVector<Input, 4> inputs_;
  Tensors written_;
  c10::SmallVector<int64_t, 16> parts_;
  c10::SmallVector<size_t, 2> changed_;
  c10::SmallVector<c10::StorageImpl*, 4> pinned_;
  c10::SmallVector<uint64_t, 8> bits_;
  c10::SmallVector<int64_t, 8> indices_;
};

// Takes the mode off torch's stack while a kernel runs, as torch does around ``__torch_dispatch__``.
class WithoutMode {
 public:
  WithoutMode() : mode_(TorchDispatchModeTLS::pop_stack()) {}
  WithoutMode(const WithoutMode&) = delete;
  ~WithoutMode() { TorchDispatchModeTLS::push_non_infra_mode_onto_stack(std::move(mode_)); }

 private:
  std::shared_ptr<c10::impl::PyObject_TorchDispatchMode> mode_;
};

// Holds the step's lock, which is Python's, unless another thread has it: Python waits for that.
class StepLock {
 public:
  explicit StepLock(const Bound& bound) : release_(Ref::of(bound[Bound::kRelease])) {
    const Ref is_taken(PyObject_CallFunctionObjArgs(bound[Bound::kAcquire], &_Py_FalseStruct, nullptr));
    is_held = PyObject_IsTrue(is_taken.get()) == 1;
  }
  StepLock(const StepLock&) = delete;
  ~StepLock() {
    if (is_held) Py_DecRef(PyObject_CallFunctionObjArgs(release_.get(), nullptr));
  }

  bool is_held;

 private:
  Ref release_;
};

// Clears the error of a function of Python's. An interrupt, or whatever else is no Exception, is raised by the thread's
// next Python code.
void clear_error() {
  PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
  PyErr_Fetch(&type, &value, &traceback);
  if (type != nullptr && PyErr_GivenExceptionMatches(type, PyExc_Exception) == 0) {
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), type);
  }
  for (PyObject* one : {type, value, traceback}) {
    if (one != nullptr) Py_DecRef(one);
  }
}

Recorder* recorder_of_top_mode() {
  const int64_t num_modes = TorchDispatchModeTLS::stack_len();
  if (num_modes == 0) return nullptr;
  const auto& top = TorchDispatchModeTLS::get_stack_at(num_modes - 1);
  if (&top->pyinterpreter() != interpreter) return nullptr;
  PyObject* mode = top->ptr(interpreter);
  for (auto& open : open_recorders) {
    Recorder* recorder = open.load();
    if (recorder != nullptr && recorder->mode.load() == mode) return recorder;
  }
  return nullptr;
}

// Records the likely call; returns false, and has done nothing, if the call is another.
bool record(Recorder& recorder, const c10::OperatorHandle& handle, Stack& stack) {
  const Gil gil;
  if (recorder.bound == nullptr) return false;
  const auto known = recorder.ops.find(&handle.schema());
  if (known == recorder.ops.end()) return false;
  std::optional<StepLock> lock;
  std::optional<Attempt> attempt;
  try {
    lock.emplace(*recorder.bound);
    if (!lock->is_held) return false;
    attempt.emplace(recorder, known->second, handle, stack);
    if (!attempt->is_likely()) return false;
    attempt->before();
  } catch (const PythonFailed&) {
    clear_error();
    if (attempt.has_value()) attempt->roll_back();
    return false;
  }
  const bool may_alert = at::globalContext().deterministicAlgorithms();
  const auto num_arguments = static_cast<int64_t>(handle.schema().arguments().size());
  const Stack arguments = may_alert ? Stack(stack.end() - num_arguments, stack.end()) : Stack();
  const size_t base = stack.size() - num_arguments;
  try {
    const WithoutGil without_gil;
    const WithoutMode without_mode;
    handle.callBoxed(&stack);
  } catch (const c10::Error& error) {
    attempt->roll_back();
    // Python decides whether the training may go on without a deterministic implementation
    if (!may_alert || std::string(error.what()).find(kAlert) == std::string::npos) throw;
    stack.resize(base);
    stack.insert(stack.end(), arguments.begin(), arguments.end());
    return false;
  } catch (...) {
    attempt->roll_back();
    throw;
  }
  recorder.num_native++;
  try {
    attempt->after();
  } catch (const PythonFailed&) {
    clear_error();
    throw std::runtime_error(
        "det_callbacks' native recorder could not write a site of the step; DET_CALLBACKS_RECORDER=python records "
        "without it");
  }
  return true;
}

void dispatch(const c10::OperatorHandle& handle, Stack* stack) {
  Recorder* recorder = recorder_of_top_mode();
  if (recorder == nullptr) {
    real->dispatch(handle, stack);
    return;
  }
  if (record(*recorder, handle, *stack)) return;
  Delegated here{recorder, &handle.schema(), {}, false};
  here.is_described = here.arguments.read(handle.schema(), *stack);
  struct Restore {
    Delegated* outer;
    ~Restore() { delegated = outer; }
  } restore{delegated};
  delegated = &here;
  recorder->num_python++;
  real->dispatch(handle, stack);
}

std::vector<int64_t> ints_of(PyObject* tuple) {
  std::vector<int64_t> numbers;
  for (intptr_t i = 0; i < PyTuple_Size(tuple); i++) numbers.push_back(as_int(PyTuple_GetItem(tuple, i)));
  return numbers;
}

}  // namespace
}  // namespace det

using namespace det;

// The functions below are called by trace/native.py, with the GIL.

DET_EXPORT const char* det_key() { return DET_KEY; }

DET_EXPORT uint64_t det_digest(const char* address, uint64_t num_bytes) { return digest_memory(address, num_bytes); }

DET_EXPORT void* det_new() { return new Recorder(); }

DET_EXPORT void det_close(void* recorder);

DET_EXPORT void det_delete(void* recorder) {
  det_close(recorder);
  delete static_cast<Recorder*>(recorder);
}

// Opens a mode, which is on top of torch's stack, for a step; ``objects`` are those of Bound.
DET_EXPORT int det_open(void* recorder, PyObject* mode, PyObject* objects, int64_t generation, int64_t layouts) {
  auto& one = *static_cast<Recorder*>(recorder);
  if (PyTuple_Size(objects) != Bound::kCount) return 0;
  if (interpreter == nullptr) {
    const int64_t num_modes = TorchDispatchModeTLS::stack_len();
    if (num_modes == 0) return 0;
    interpreter = &TorchDispatchModeTLS::get_stack_at(num_modes - 1)->pyinterpreter();
    real = interpreter->vtable_;
    interpreter->vtable_ = new Proxy(real, &dispatch);  // for good: another thread may be inside
  }
  if (one.generation != generation) one.calls.clear();
  if (one.layouts_generation != layouts) one.slots.clear();
  one.generation = generation;
  one.layouts_generation = layouts;
  one.bound = std::make_shared<Bound>(objects);
  one.mode = mode;
  for (auto& open : open_recorders) {
    if (open.load() == &one) return 1;
  }
  for (auto& open : open_recorders) {
    Recorder* none = nullptr;
    if (open.compare_exchange_strong(none, &one)) return 1;
  }
  one.bound.reset();
  return 0;  // more modes than anybody opens
}

// Closes a mode; its ops go to Python from now on.
DET_EXPORT void det_close(void* recorder) {
  auto& one = *static_cast<Recorder*>(recorder);
  for (auto& open : open_recorders) {
    Recorder* expected = &one;
    open.compare_exchange_strong(expected, nullptr);
  }
  one.mode = nullptr;
  one.bound.reset();
}

DET_EXPORT int64_t det_num_native(void* recorder) { return static_cast<Recorder*>(recorder)->num_native; }
DET_EXPORT int64_t det_num_python(void* recorder) { return static_cast<Recorder*>(recorder)->num_python; }

// Teaches an op, of which Python runs a call: (func, name, is_view, is_functional, reason why it is skipped or None,
// writes, conditions, fresh).
DET_EXPORT void det_teach_op(PyObject* facts) {
  if (delegated == nullptr) return;
  try {
    const std::string name = c10::toString(delegated->schema->operator_name());
    if (PyUnicode_CompareWithASCIIString(PyTuple_GetItem(facts, 1), name.c_str()) != 0) return;
    Op op;
    op.is_view = PyObject_IsTrue(PyTuple_GetItem(facts, 2)) == 1;
    op.is_functional = PyObject_IsTrue(PyTuple_GetItem(facts, 3)) == 1;
    if (PyTuple_GetItem(facts, 4) != &_Py_NoneStruct) op.skipped_as = Ref::of(PyTuple_GetItem(facts, 4));
    op.writes = ints_of(PyTuple_GetItem(facts, 5));
    op.conditions = ints_of(PyTuple_GetItem(facts, 6));
    op.fresh = ints_of(PyTuple_GetItem(facts, 7));
    op.func = Ref::of(PyTuple_GetItem(facts, 0)).release();
    delegated->recorder->ops.emplace(delegated->schema, std::move(op));
  } catch (const PythonFailed&) {
    clear_error();
  }
}

// Teaches the node of the call that Python has just recorded; its op has been taught.
DET_EXPORT void det_teach(PyObject* node) {
  if (delegated == nullptr || !delegated->is_described) return;
  const auto known = delegated->recorder->ops.find(delegated->schema);
  if (known == delegated->recorder->ops.end()) return;
  const auto& n = names();
  try {
    if (attribute(node, n.func_).get() != known->second.func) return;
    auto call = std::make_unique<Call>();
    call->op = &known->second;
    call->phase = attribute(node, n.phase_);
    call->scope = attribute(node, n.scope_);
    call->names = attribute(node, n.names_);
    call->shared = attribute(node, n.shared_);
    call->consts = attribute(node, n.consts_);
    if (PyList_Size(call->consts.get()) != delegated->arguments.num_constants) return;
    const Ref read_labels = attribute(node, n.read_labels_);
    for (intptr_t i = 0; i < PyList_Size(read_labels.get()); i++) {
      PyObject* label = PyList_GetItem(read_labels.get(), i);
      if (!is_int(label)) return;  // an input of which a part was written
      call->read_labels.push_back(as_int(label));
    }
    call->numbers = ints_of(attribute(node, n.number_indices_).get());
    call->num_outputs = int_attribute(node, n.num_outputs_);
    const Ref labels = attribute(call->shared.get(), n.labels_);
    call->first_label = int_attribute(labels.get(), n.start_);
    call->num_labels = int_attribute(labels.get(), n.stop_) - call->first_label;
    const int64_t num_inputs = PyList_Size(call->names.get());
    if (call->num_labels != num_inputs + (call->numbers.empty() ? 0 : 1) + call->num_outputs) return;
    call->arguments = std::move(delegated->arguments);
    delegated->is_described = false;
    auto* at = static_cast<Call*>(PyLong_AsVoidPtr(attribute(node, n.native_).get()));
    if (at != nullptr) {  // other numbers, or the same after an op that only Python runs
      *at = std::move(*call);
      return;
    }
    const Ref pointer(PyLong_FromVoidPtr(call.get()));
    delegated->recorder->calls.push_back(std::move(call));
    check(PyObject_SetAttr(node, n.native_, pointer.get()));
  } catch (const PythonFailed&) {
    clear_error();
  }
}
