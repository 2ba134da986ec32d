/* What the tensors inside a batch are told by: their versions, their bytes and where they lie.

   Includes nothing: it is a part of _kernel.c. */

/* Add where a tensor's storage lies: that of a slice of a batch is the batch's. 0 where that cannot be told. */
static int add_address(PyObject *tensor, const Task *task, PyObject *addresses)
{
    int64_t offset = ask_integer(ask_offset, tensor);
    if (PyErr_Occurred() || !task->count)
        return 0;
    PyObject *address = PyLong_FromUnsignedLongLong((uintptr_t)task->data - (uint64_t)offset * type_width[task->type]);
    int done = address && PySet_Add(addresses, address) == 0;
    Py_XDECREF(address);
    return done;
}

/* Add the version of every tensor inside a value, their bytes and, unless that is NULL, where their storages lie; 0 where a
   tensor or a container is not a plain one. */
static int weigh_part(PyObject *value, PyObject *versions, int64_t *bytes, PyObject *addresses, int depth)
{
    Task task;
    Layout layout;
    if (value == Py_None || PyUnicode_Check(value) || PyLong_Check(value) || PyFloat_Check(value))
        return 1;
    if (is_plain_type(value)) {
        int fine = read_tensor(value, 0, &task, &layout) && append_number(versions, read_version(value));
        *bytes += fine ? count_bytes(&task) : 0;
        fine = fine && (!addresses || add_address(value, &task, addresses));
        return fine;
    }
    if (depth > MAX_DEPTH)
        return 0;
    int fine = PyTuple_CheckExact(value) || PyList_CheckExact(value) || PyDict_CheckExact(value);
    Py_ssize_t size = fine ? PyObject_Size(value) : MOST_PARTS + 1;
    fine = size <= MOST_PARTS;
    PyObject *part;
    if (fine && PyDict_CheckExact(value))
        for (Py_ssize_t at = 0; fine && PyDict_Next(value, &at, NULL, &part);)
            fine = weigh_part(part, versions, bytes, addresses, depth + 1);
    else
        for (Py_ssize_t i = 0; fine && i < size; i++) {
            part = PyTuple_CheckExact(value) ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i);
            fine = part && weigh_part(part, versions, bytes, addresses, depth + 1);
        }
    return fine;
}

PyDoc_STRVAR(weigh_doc, "weigh(value) -> tuple | None\n\n"
                        "Return the versions of the tensors inside tuples, lists and dicts, in order, and the bytes they take;\n"
                        "None where something else is inside.");

static PyObject *weigh(PyObject *module, PyObject *value)
{
    int64_t bytes = 0;
    (void)module;
    PyObject *versions = is_observed() ? NULL : PyList_New(0);
    if (!versions || !weigh_part(value, versions, &bytes, NULL, 0)) {
        Py_XDECREF(versions);
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return Py_BuildValue("NL", versions, (long long)bytes);
}
