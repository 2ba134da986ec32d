/* What the tensors inside a batch are told by: their versions, their bytes and where they lie.

   Includes nothing: it is a part of _kernel.c. */

/* What the tensors of a value are told by, in order: versions to be listed and, unless that is NULL, the addresses of their
   storages, or, where `known` is not NULL, versions to be compared with these and nothing else. */
typedef struct {
    PyObject *versions, *addresses, *known;
    Py_ssize_t seen;
    int64_t bytes;
} Weight;

/* Add where a tensor's storage lies: that of a slice of a batch is the batch's. 0 where that cannot be told. */
static int add_address(PyObject *tensor, const Task *task, PyObject *addresses)
{
    int64_t offset = ask_integer(ask_offset, tensor);
    if (PyErr_Occurred() || !task->count)
        return 0;
    return append_number(addresses, (int64_t)(uintptr_t)task->data - offset * type_width[task->type]);
}

/* 0 where a tensor is not simply memory, or not at the version that is known. */
static int weigh_tensor(PyObject *tensor, Weight *weight)
{
    Task task;
    Layout layout;
    int64_t version = read_version(tensor);
    if (weight->known) {
        PyObject *known = weight->seen < PyList_Size(weight->known) ? PyList_GetItem(weight->known, weight->seen++) : NULL;
        return known && PyLong_AsLongLong(known) == version;
    }
    if (!read_tensor(tensor, 0, &task, &layout) || !append_number(weight->versions, version))
        return 0;
    weight->bytes += count_bytes(&task);
    return !weight->addresses || add_address(tensor, &task, weight->addresses);
}

/* 0 where a tensor or a container inside a value is not a plain one. */
static int weigh_part(PyObject *value, Weight *weight, int depth)
{
    if (value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) || PyFloat_Check(value))
        return 1;
    if (is_plain_type(value))
        return weigh_tensor(value, weight);
    if (depth > MAX_DEPTH)
        return 0;
    int fine = PyTuple_CheckExact(value) || PyList_CheckExact(value) || PyDict_CheckExact(value);
    Py_ssize_t size = fine ? PyObject_Size(value) : MOST_PARTS + 1;
    fine = size <= MOST_PARTS;
    PyObject *part;
    if (fine && PyDict_CheckExact(value))
        for (Py_ssize_t at = 0; fine && PyDict_Next(value, &at, NULL, &part);)
            fine = weigh_part(part, weight, depth + 1);
    else
        for (Py_ssize_t i = 0; fine && i < size; i++) {
            part = PyTuple_CheckExact(value) ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
            fine = part && weigh_part(part, weight, depth + 1);
        }
    return fine;
}

PyDoc_STRVAR(weigh_doc, "weigh(value) -> tuple | None\n\n"
                        "Return the versions of the tensors inside tuples, lists and dicts, in order, and the bytes they take;\n"
                        "None where something else is inside.");

static PyObject *weigh(PyObject *module, PyObject *value)
{
    Weight weight = {.versions = is_observed() ? NULL : PyList_New(0)};
    (void)module;
    if (!weight.versions || !weigh_part(value, &weight, 0)) {
        Py_XDECREF(weight.versions);
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return Py_BuildValue("NL", weight.versions, (long long)weight.bytes);
}
