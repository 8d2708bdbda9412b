// The interpreter that torch's dispatcher asks, with a dispatch of ours: everything else is passed on to Python's own.
#pragma once
#include <c10/core/impl/PyInterpreter.h>
#include <torch/version.h>

namespace det {

using c10::TensorImpl;
using c10::impl::PyInterpreterVTable;

using Dispatch = void (*)(const c10::OperatorHandle&, torch::jit::Stack*);

#define DET_PASS(ret, name, params, args) \
  ret name params const override { return real_->name args; }

class Proxy final : public PyInterpreterVTable {
 public:
  Proxy(const PyInterpreterVTable* real, Dispatch ours) : real_(real), ours_(ours) {}

  void dispatch(const c10::OperatorHandle& op, torch::jit::Stack* stack) const override { ours_(op, stack); }

  using D = c10::DeviceType;
  using T = const TensorImpl*;
  using U = uintptr_t;
  DET_PASS(std::string, name, (), ())
  DET_PASS(void, incref, (PyObject * a), (a))
  DET_PASS(void, decref, (PyObject * a), (a))
  DET_PASS(bool, try_incref, (const c10::impl::PyObjectSlot& a), (a))
  DET_PASS(size_t, refcnt, (PyObject * a), (a))
  DET_PASS(c10::intrusive_ptr<TensorImpl>, detach, (T a), (a))
  DET_PASS(void, reportErrorCallback, (PyObject * a, c10::DispatchKey b), (a, b))
  DET_PASS(
      void,
      python_op_registration_trampoline,
      (const c10::OperatorHandle& a, c10::DispatchKey b, c10::DispatchKeySet c, torch::jit::Stack* d, bool e, bool f),
      (a, b, c, d, e, f))
  DET_PASS(
      void, throw_abstract_impl_not_imported_error, (std::string a, const char* b, const char* c), (std::move(a), b, c))
  DET_PASS(
      void,
      python_dispatcher,
      (const c10::OperatorHandle& a, c10::DispatchKeySet b, torch::jit::Stack* c),
      (a, b, c))
  DET_PASS(bool, is_contiguous, (T a, at::MemoryFormat b), (a, b))
  DET_PASS(c10::SymBool, sym_is_contiguous, (T a, at::MemoryFormat b), (a, b))
  DET_PASS(bool, is_strides_like, (T a, at::MemoryFormat b), (a, b))
  DET_PASS(bool, is_non_overlapping_and_dense, (T a), (a))
  DET_PASS(c10::Device, device, (T a), (a))
  DET_PASS(int64_t, dim, (T a), (a))
  DET_PASS(c10::IntArrayRef, strides, (T a), (a))
  DET_PASS(c10::IntArrayRef, sizes, (T a), (a))
  DET_PASS(c10::SymIntArrayRef, sym_sizes, (T a), (a))
  DET_PASS(c10::Layout, layout, (T a), (a))
  DET_PASS(int64_t, numel, (T a), (a))
  DET_PASS(c10::SymInt, sym_numel, (T a), (a))
  DET_PASS(c10::SymIntArrayRef, sym_strides, (T a), (a))
  DET_PASS(c10::SymInt, sym_storage_offset, (T a), (a))
  DET_PASS(void, trace_gpu_event_creation, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_event_deletion, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_event_record, (D a, U b, U c), (a, b, c))
  DET_PASS(void, trace_gpu_event_wait, (D a, U b, U c), (a, b, c))
  DET_PASS(void, trace_gpu_memory_allocation, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_memory_deallocation, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_stream_creation, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_device_synchronization, (D a), (a))
  DET_PASS(void, trace_gpu_stream_synchronization, (D a, U b), (a, b))
  DET_PASS(void, trace_gpu_event_synchronization, (D a, U b), (a, b))
  DET_PASS(void, reset_backward_hooks, (T a), (a))

 private:
  const PyInterpreterVTable* real_;
  Dispatch ours_;
};

#undef DET_PASS

}  // namespace det
