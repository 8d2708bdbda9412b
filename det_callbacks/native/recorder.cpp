// A dispatch mode whose dispatch is C++. A call that the step is likely to make next is recorded here (attempt.h), on
// the ledger that Python keeps; any other call goes to Python, before anything of it has run, and Python teaches what
// it recorded.
//
// The GIL guards everything here, apart from the kernel's own run. It is never held while a kernel runs.
#include <ATen/Context.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "attempt.h"
#include "digest.h"
#include "proxy.h"
#include "python.h"
#include "state.h"

#define DET_EXPORT extern "C" __attribute__((visibility("default")))

namespace det {
namespace {

using c10::impl::TorchDispatchModeTLS;

constexpr char kAlert[] = "does not have a deterministic implementation";

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
