// The arguments of a call that are no tensors: whether two calls have the same, and which are numbers that may vary.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstring>
#include <vector>

#include "python.h"

namespace det {

// Whether two arguments are the same to the bit, so that they are equal Python objects of one class.
inline bool is_same(const c10::IValue& a, const c10::IValue& b) {
  if (a.isNone()) return b.isNone();
  if (a.isBool()) return b.isBool() && a.toBool() == b.toBool();
  if (a.isInt()) return b.isInt() && a.toInt() == b.toInt();
  if (a.isDouble()) {
    if (!b.isDouble()) return false;
    const double x = a.toDouble(), y = b.toDouble();
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (a.isString()) return b.isString() && a.toStringRef() == b.toStringRef();
  if (a.isDevice()) return b.isDevice() && a.toDevice() == b.toDevice();
  if (a.isList()) {
    if (!b.isList()) return false;
    const auto x = a.toListRef(), y = b.toListRef();
    if (x.size() != y.size()) return false;
    for (size_t i = 0; i < x.size(); i++) {
      if (!is_same(x[i], y[i])) return false;
    }
    return true;
  }
  return false;  // generators, symbolic numbers and whatever else: Python compares them
}

// One argument of a call: a tensor, a list with tensors, or a constant.
struct Argument {
  enum Kind { kConstant, kTensor, kList } kind = kConstant;
  c10::IValue constant;             // no tensor is kept
  std::vector<bool> is_tensor = {};  // of a list: which items are tensors; the others are None
  int number = -1;                  // index among the constants that Python compares, for one outside lists
  bool is_default = false;          // whether Python leaves it out
};

// Whether a value is a tensor for Python: a number that torch has wrapped is a number again there.
inline bool is_defined(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() &&
         !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
}

// Returns a constant as Python sees it: None for an undefined tensor, and the number that a tensor wraps.
inline c10::IValue unwrapped(const c10::IValue& value) {
  if (!value.isTensor()) return value;
  const auto& tensor = value.toTensor();
  if (!tensor.defined()) return {};
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case c10::ScalarType::Double:
      return *static_cast<const double*>(data);
    case c10::ScalarType::Long:
      return *static_cast<const int64_t*>(data);
    case c10::ScalarType::Bool:
      return *static_cast<const bool*>(data);
    default:
      return value;  // a complex number, which only Python compares
  }
}

// Describes an argument; returns false for a kind that only Python handles.
inline bool describe(const c10::IValue& value, Argument& found) {
  if (is_defined(value)) {
    found.kind = Argument::kTensor;
    return true;
  }
  if (value.isList()) {
    bool has_tensors = false, has_others = false;
    for (const auto& item : value.toListRef()) {
      const bool is_tensor = is_defined(item);
      has_tensors |= is_tensor;
      has_others |= !is_tensor && !item.isTensor() && !item.isNone();
      found.is_tensor.push_back(is_tensor);
    }
    if (has_tensors) {
      found.kind = Argument::kList;
      return !has_others;
    }
    found.is_tensor.clear();
  }
  found.constant = unwrapped(value);
  return is_same(found.constant, found.constant);
}

// Whether an argument has the same tensors and nones, whatever the tensors.
inline bool has_kind(const Argument& known, const c10::IValue& value) {
  if (known.kind == Argument::kTensor) return is_defined(value);
  if (known.kind == Argument::kConstant) return !is_defined(value);
  if (!value.isList()) return false;
  const auto items = value.toListRef();
  if (items.size() != known.is_tensor.size()) return false;
  for (size_t i = 0; i < items.size(); i++) {
    if (is_defined(items[i]) != known.is_tensor[i]) return false;
  }
  return true;
}

inline bool is_number(const c10::IValue& value) {
  if (value.isInt() || value.isDouble()) return true;
  if (!value.isList()) return false;
  for (const auto& item : value.toListRef()) {
    if (!item.isInt() && !item.isDouble()) return false;
  }
  return true;
}

// Returns a number, or a list of numbers, as Python sees it.
inline Ref as_python(const c10::IValue& value) {
  if (value.isInt()) return Ref(PyLong_FromLongLong(value.toInt()));
  if (value.isDouble()) return Ref(PyFloat_FromDouble(value.toDouble()));
  const auto items = value.toListRef();
  Ref list(PyList_New(static_cast<intptr_t>(items.size())));
  for (size_t i = 0; i < items.size(); i++) {
    check(PyList_SetItem(list.get(), static_cast<intptr_t>(i), as_python(items[i]).release()));
  }
  return list;
}

// The arguments of one call, in the order of the schema.
struct Arguments {
  std::vector<Argument> each;
  int num_constants = 0;

  // Describes the arguments on top of the stack; returns false if only Python handles the call.
  bool read(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
    const auto& declared = schema.arguments();
    const size_t base = stack.size() - declared.size();
    each.assign(declared.size(), Argument());
    size_t num_positional = declared.size();
    while (num_positional > 0 && declared[num_positional - 1].kwarg_only()) num_positional--;
    for (size_t i = 0; i < declared.size(); i++) {
      if (!describe(stack[base + i], each[i])) return false;
      // Python would count it by a name
      if (i >= num_positional && each[i].kind != Argument::kConstant) return false;
    }
    for (size_t i = declared.size(); i-- > 0;) {
      each[i].is_default = is_left_out(declared[i], stack[base + i], each, i, num_positional);
    }
    num_constants = 0;
    for (auto& one : each) {
      if (one.kind == Argument::kConstant && !one.is_default) one.number = num_constants++;
      if (one.kind == Argument::kList) {
        for (const bool is_tensor : one.is_tensor) num_constants += is_tensor ? 0 : 1;
      }
    }
    return true;
  }

  // Whether torch omits an argument where it calls Python: its value is the default, and so are all positional ones
  // after it (``parseIValuesToPyArgsKwargs``).
  static bool is_left_out(
      const c10::Argument& declared,
      const c10::IValue& value,
      const std::vector<Argument>& each,
      size_t index,
      size_t num_positional) {
    if (!declared.default_value().has_value() || *declared.default_value() != value) return false;
    return index + 1 >= num_positional || each[index + 1].is_default;
  }
};

}  // namespace det
