/* Questions about lists that an optimizer keeps, without a Python frame for each.

   Includes nothing: it is a part of _kernel.c. */

static PyObject *str_params;

PyDoc_STRVAR(has_same_doc, "has_same(dicts, others, keys) -> bool\n\n"
                           "Return whether two lists of dicts have, pair by pair, the very same things under some keys.");

static int has_same_under(PyObject *dict, PyObject *other, PyObject *keys)
{
    int same = dict && other && PyDict_Check(dict) && PyDict_Check(other);
    for (Py_ssize_t i = 0; same && i < PyTuple_Size(keys); i++) {
        PyObject *key = PyTuple_GetItem(keys, i);
        same = PyDict_GetItemWithError(dict, key) == PyDict_GetItemWithError(other, key);
    }
    return same;
}

static int has_same_groups(PyObject *dicts, PyObject *others, PyObject *keys)
{
    int same = PyList_Check(dicts) && PyList_Check(others) && PyList_Size(dicts) == PyList_Size(others);
    for (Py_ssize_t i = 0; same && i < PyList_Size(dicts); i++)
        same = has_same_under(PyList_GetItem(dicts, i), PyList_GetItem(others, i), keys);
    return same && !PyErr_Occurred();
}

static PyObject *has_same(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 3))
        return NULL;
    int same = has_same_groups(args[0], args[1], args[2]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

PyDoc_STRVAR(holds_doc, "holds(groups, parameters) -> bool\n\n"
                        "Return whether the parameters of an optimizer's groups, one after another, are these very ones.");

static int holds_all(PyObject *groups, PyObject *parameters)
{
    Py_ssize_t at = 0;
    int same = PyList_Check(groups) && PyList_Check(parameters);
    for (Py_ssize_t i = 0; same && i < PyList_Size(groups); i++) {
        PyObject *group = PyList_GetItem(groups, i);
        PyObject *held = PyDict_Check(group) ? PyDict_GetItemWithError(group, str_params) : NULL;
        same = held && PyList_Check(held) && at + PyList_Size(held) <= PyList_Size(parameters);
        for (Py_ssize_t k = 0; same && k < PyList_Size(held); k++)
            same = PyList_GetItem(held, k) == PyList_GetItem(parameters, at++);
    }
    return same && at == PyList_Size(parameters);
}

static PyObject *holds(PyObject *module, PyObject *const *args, Py_ssize_t n)
{
    (void)module;
    if (!has_count(n, 2))
        return NULL;
    int same = holds_all(args[0], args[1]);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

PyDoc_STRVAR(list_versions_doc, "list_versions(tensors) -> list\n\n"
                                "Return how often each tensor of a list has been written in its place.");

static PyObject *list_versions(PyObject *module, PyObject *tensors)
{
    PyObject *versions = PyList_New(0);
    (void)module;
    for (Py_ssize_t i = 0; versions && i < PyList_Size(tensors); i++)
        if (!append_number(versions, read_version(PyList_GetItem(tensors, i))))
            Py_CLEAR(versions);
    return versions;
}

PyDoc_STRVAR(list_gradients_doc, "list_gradients(tensors) -> list | None\n\n"
                                 "Return the gradient of each tensor of a list; None where one of them has none.");

static PyObject *list_gradients(PyObject *module, PyObject *tensors)
{
    PyObject *gradients = PyList_New(0);
    (void)module;
    for (Py_ssize_t i = 0; gradients && i < PyList_Size(tensors); i++) {
        PyObject *gradient = PyObject_GetAttr(PyList_GetItem(tensors, i), str_grad);
        if (gradient == Py_None || !gradient || PyList_Append(gradients, gradient) < 0)
            Py_CLEAR(gradients);
        Py_XDECREF(gradient);
    }
    if (!gradients && !PyErr_Occurred())
        Py_RETURN_NONE;
    return gradients;
}
