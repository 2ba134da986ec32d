/* Questions to a tensor by the methods it has in Python, and whether it is one that torch tells of by itself.

   Includes nothing: it is a part of _kernel.c. */

static int64_t ask_integer(PyObject *method, PyObject *tensor)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    int64_t value = answer ? PyLong_AsLongLong(answer) : -1;
    Py_XDECREF(answer);
    return value;
}

static int ask_truth(PyObject *method, PyObject *tensor)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    int value = answer == Py_True;
    Py_XDECREF(answer);
    return value;
}

static int read_flag(PyObject *tensor, PyObject *name)
{
    PyObject *answer = PyObject_GetAttr(tensor, name);
    int value = answer == Py_True;
    Py_XDECREF(answer);
    return value;
}

static int find_dtype(PyObject *tensor)
{
    PyObject *dtype = PyObject_GetAttr(tensor, str_dtype);
    int code = -1;
    for (Py_ssize_t i = 0; i < dtypes && code < 0; i++)
        if (dtype_object[i] == dtype)
            code = dtype_code[i];
    Py_XDECREF(dtype);
    return code;
}

/* While a user's torch-function mode is active it would see our questions: then the caller must step out of it. */
static int is_observed(void)
{
    PyObject *answer = PyObject_CallFunctionObjArgs(ask_mode, NULL);
    int value = answer != Py_False;
    Py_XDECREF(answer);
    PyErr_Clear();
    return value;
}

/* Torch has refused to tell of a tensor. Its refusal gathers the stack in C++, which takes milliseconds: from then on
   tensors are asked beforehand whether they are of those it has nothing to tell of. */
static int was_refused;

/* Whether torch tells where a tensor lies: not inside torch.func transforms, nor of sparse, meta and quantized ones. */
static int may_tell(PyObject *tensor)
{
    int may = !is_observed() && ask_truth(ask_storage, tensor) && read_flag(tensor, str_is_cpu) &&
              find_dtype(tensor) >= 0 && !read_flag(tensor, str_is_nested);
    PyErr_Clear();
    return may;
}
