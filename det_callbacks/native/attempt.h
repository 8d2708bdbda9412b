// One call: whether it is the one that the step is likely to make next, and its sites on the ledger that Python keeps.
#pragma once
#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else  // torch 2.11
#include <torch/csrc/autograd/function.h>
#endif

#include <algorithm>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "digest.h"
#include "state.h"

namespace det {

using c10::DispatchKey;
using c10::DispatchKeySet;
using torch::jit::Stack;

constexpr int kEqual = 2;  // Py_EQ
constexpr size_t kThreadedBytes = 16 * 1024 * 1024;  // Python digests more than this in two threads

inline PyObject* object_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

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
inline bool is_known_dtype(c10::ScalarType dtype) {
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
inline bool is_plain_impl(const at::Tensor& tensor) {
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
      const auto& numbers = call_->numbers;
      if (std::find(numbers.begin(), numbers.end(), known[i].number) == numbers.end()) return false;
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
    if (slot == nullptr || !slot->is_dense) return false;
    if (slot->num_bytes == 0 || slot->num_bytes != storage->nbytes()) return false;
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
      PyObject* writers = bound_[Bound::kWriters];
      if (find(writers, address.get()) != nullptr) check(PyDict_DelItem(writers, address.get()));
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

  // Records that a site wrote a tensor, as ``Recorder._append_outputs`` does.
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

  // ``CallGraph.advance_if_likely``, once the call is the likely one
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

}  // namespace det
