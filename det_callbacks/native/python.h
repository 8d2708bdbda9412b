// The functions of Python's stable C API that the native recorder calls, declared here because a user's machine may
// have no Python headers. The interpreter exports them. All of them need the GIL, but for the first four.
#pragma once
#include <c10/util/python_stub.h>

#include <cstdint>
#include <utility>

extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int state);
int PyGILState_Check();
unsigned long PyThread_get_thread_ident();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);
PyObject* PyObject_Type(PyObject*);
PyObject* PyObject_GetAttr(PyObject*, PyObject* name);
int PyObject_SetAttr(PyObject*, PyObject* name, PyObject* value);
int PyObject_IsTrue(PyObject*);
int PyObject_RichCompareBool(PyObject*, PyObject*, int comparison);
PyObject* PyObject_CallFunctionObjArgs(PyObject* function, ...);
PyObject* PyObject_CallMethodObjArgs(PyObject* object, PyObject* name, ...);
PyObject* PyDict_GetItemWithError(PyObject*, PyObject* key);  // borrowed
int PyDict_SetItem(PyObject*, PyObject* key, PyObject* value);
int PyDict_DelItem(PyObject*, PyObject* key);
intptr_t PyDict_Size(PyObject*);
intptr_t PySet_Size(PyObject*);
intptr_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, intptr_t);  // borrowed
PyObject* PyTuple_New(intptr_t);
int PyTuple_SetItem(PyObject*, intptr_t, PyObject* stolen);
PyObject* PyTuple_Pack(intptr_t, ...);
PyObject* PySequence_List(PyObject*);
PyObject* PyList_New(intptr_t);
intptr_t PyList_Size(PyObject*);
PyObject* PyList_GetItem(PyObject*, intptr_t);  // borrowed
int PyList_SetItem(PyObject*, intptr_t, PyObject* stolen);
int PyList_Append(PyObject*, PyObject*);
PyObject* PyLong_FromLongLong(long long);
PyObject* PyLong_FromUnsignedLongLong(unsigned long long);
PyObject* PyLong_FromVoidPtr(void*);
long long PyLong_AsLongLong(PyObject*);
unsigned long long PyLong_AsUnsignedLongLong(PyObject*);
void* PyLong_AsVoidPtr(PyObject*);
PyObject* PyFloat_FromDouble(double);
PyObject* PyBytes_FromStringAndSize(const char*, intptr_t);
PyObject* PyUnicode_FromStringAndSize(const char*, intptr_t);
PyObject* PyUnicode_InternFromString(const char*);
int PyUnicode_CompareWithASCIIString(PyObject*, const char*);
PyObject* PyErr_Occurred();  // borrowed
void PyErr_Clear();
void PyErr_Fetch(PyObject** type, PyObject** value, PyObject** traceback);
int PyErr_GivenExceptionMatches(PyObject* error, PyObject* type);
int PyThreadState_SetAsyncExc(unsigned long thread, PyObject* type);
extern PyObject* PyExc_Exception;
struct _frame;
_frame* PyEval_GetFrame();  // borrowed
PyObject* PyFrame_GetCode(_frame*);
extern PyObject PyLong_Type;
extern PyObject _Py_NoneStruct;
extern PyObject _Py_FalseStruct;
}

namespace det {

// Thrown where a function of Python's API has failed; its catch clears Python's error.
struct PythonFailed {};

// Owns one reference to a Python object.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw PythonFailed();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() {
    if (object_ != nullptr) Py_DecRef(object_);
  }
  static Ref of(PyObject* borrowed) {
    if (borrowed == nullptr) throw PythonFailed();
    Py_IncRef(borrowed);
    return Ref(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  bool is_none() const { return object_ == &_Py_NoneStruct; }

 private:
  PyObject* object_ = nullptr;
};

inline Ref attribute(PyObject* object, PyObject* name) { return Ref(PyObject_GetAttr(object, name)); }

inline void check(int status) {
  if (status < 0) throw PythonFailed();
}

inline int64_t as_int(PyObject* number) {
  const int64_t value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw PythonFailed();
  return value;
}

inline int64_t int_attribute(PyObject* object, PyObject* name) { return as_int(attribute(object, name).get()); }

inline bool is_true(PyObject* object, PyObject* name) {
  const int truth = PyObject_IsTrue(attribute(object, name).get());
  check(truth);
  return truth != 0;
}

// Whether an object is an int (and no bool, whose class is another).
inline bool is_int(PyObject* object) { return Ref(PyObject_Type(object)).get() == &PyLong_Type; }

// Returns the value of a key, borrowed, or null if there is none.
inline PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw PythonFailed();
  return found;
}

// Holds the GIL, also in a thread that Python does not know.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  Gil(const Gil&) = delete;
  ~Gil() { PyGILState_Release(state_); }

 private:
  int state_;
};

// Releases the GIL if this thread holds it.
class WithoutGil {
 public:
  WithoutGil() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  void* state_;
};

}  // namespace det
