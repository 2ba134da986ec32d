/* One output of a module, put down and its gradient waited for: what `ForwardLens._record_leaf` and `GradientHooks.watch`
   do in Python, without a Python frame.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

static PyObject *str_requires_grad, *str_grad_fn, *str_output_nr, *str_register;

enum { MAX_CALLS = 16, RECENT = 8 };

/* A module under observation; the base of `ModuleEntry`. */
typedef struct {
    PyObject_HEAD
    long site, serial, calls, eval_calls, recalls, eval_recalls;
    char wanted, off;
} Place;

static PyTypeObject *place_type;

#define PLACE(name, type) {#name, type, offsetof(Place, name), 0, NULL}

static PyMemberDef place_members[] = {
    PLACE(site, T_LONG),    PLACE(serial, T_LONG),       PLACE(calls, T_LONG),  PLACE(eval_calls, T_LONG),
    PLACE(recalls, T_LONG), PLACE(eval_recalls, T_LONG), PLACE(wanted, T_BOOL), PLACE(off, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot place_slots[] = {
    {Py_tp_doc, "Place()\n\nA module under observation: its site, and its calls in the current step."},
    {Py_tp_members, place_members},
    {0, NULL},
};

static PyType_Spec place_spec = {
    "clew.stats._kernel.Place", sizeof(Place), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, place_slots,
};

/* A tensor that was seen, weakly, the keys its gradient goes to, and its row; -1 without one. */
typedef struct {
    PyObject *tensor, *targets;
    int64_t version, serial, row;
} Seen;

typedef struct {
    PyObject_HEAD
    Tray *tray;
    PyObject *anchors, *watch; /* key -> (tensor that owns the hook, hooks, targets), and what makes them */
    int64_t output_kind, gradient_kind;
    /* The tensors seen last. A module that returns what one inside it has returned, or a shortcut beside it what came
       before, gets the same numbers. */
    const void *addresses[RECENT];
    Seen recent[RECENT];
    int next;
} Leaf;

static int intern_leaf_names(void)
{
    return (str_requires_grad = PyUnicode_InternFromString("requires_grad")) &&
           (str_grad_fn = PyUnicode_InternFromString("grad_fn")) &&
           (str_output_nr = PyUnicode_InternFromString("output_nr")) &&
           (str_register = PyUnicode_InternFromString("_register_hook_dict"));
}

static int traverse_leaf(PyObject *self, visitproc visit, void *arg)
{
    Leaf *leaf = (Leaf *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(leaf->tray);
    Py_VISIT(leaf->anchors);
    Py_VISIT(leaf->watch);
    for (int i = 0; i < RECENT; i++) {
        Py_VISIT(leaf->recent[i].tensor);
        Py_VISIT(leaf->recent[i].targets);
    }
    return 0;
}

static void forget_seen(Leaf *leaf)
{
    for (int i = 0; i < RECENT; i++) {
        leaf->addresses[i] = NULL;
        Py_CLEAR(leaf->recent[i].tensor);
        Py_CLEAR(leaf->recent[i].targets);
    }
}

static int clear_leaf(PyObject *self)
{
    Leaf *leaf = (Leaf *)self;
    Py_CLEAR(leaf->tray);
    Py_CLEAR(leaf->anchors);
    Py_CLEAR(leaf->watch);
    forget_seen(leaf);
    return 0;
}

static void free_leaf(PyObject *self)
{
    release_object(self, clear_leaf);
}

static PyObject *make_leaf(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tray, *anchors, *watch;
    long long output_kind, gradient_kind;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!O!OLL", tray_type, &tray, &PyDict_Type, &anchors, &watch, &output_kind,
                          &gradient_kind))
        return NULL;
    Leaf *leaf = allocate(type);
    if (leaf) {
        Py_INCREF(leaf->tray = (Tray *)tray);
        Py_INCREF(leaf->anchors = anchors);
        Py_INCREF(leaf->watch = watch);
        leaf->output_kind = output_kind;
        leaf->gradient_kind = gradient_kind;
    }
    return (PyObject *)leaf;
}

/* Borrowed; NULL for a node that has to be watched by the long way, or with an error set. */
static PyObject *find_targets(const Leaf *leaf, PyObject *tensor, PyObject *key)
{
    PyObject *anchor = PyDict_GetItemWithError(leaf->anchors, key);
    if (!anchor || read_integer(tensor, str_output_nr) != 0)
        return NULL;
    PyObject *node = PyObject_GetAttr(tensor, str_grad_fn);
    PyObject *targets = PyTuple_GetItem(anchor, 2);
    if (!node || node == Py_None || !targets || PyList_SetSlice(targets, 1, PyList_Size(targets), NULL) < 0) {
        Py_XDECREF(node);
        return NULL;
    }
    PyObject *done = PyObject_CallMethodObjArgs(node, str_register, PyTuple_GetItem(anchor, 0), NULL);
    Py_DECREF(node);
    Py_XDECREF(done);
    return done ? targets : NULL;
}

/* Have the gradient of a tensor measured under a key; the list that takes further ones is put into `targets`, or NULL. */
static int watch_gradient(const Leaf *leaf, PyObject *tensor, int64_t at, PyObject **targets)
{
    PyObject *key = PyLong_FromLongLong(at), *found = key ? find_targets(leaf, tensor, key) : NULL;
    Py_XINCREF(found);
    if (!found && key && !PyErr_Occurred())
        found = PyObject_CallFunctionObjArgs(leaf->watch, tensor, key, NULL);
    Py_XDECREF(key);
    PyObject *before = *targets;
    *targets = found == Py_None ? NULL : found;
    Py_XDECREF(before);
    if (found == Py_None)
        Py_DECREF(found);
    return found != NULL;
}

/* -1 for a tensor of inference mode: it has no version, and nothing tells whether it was written to. */
static int64_t read_version_if_any(PyObject *tensor)
{
    int64_t version = read_integer(tensor, str_version);
    PyErr_Clear();
    return version;
}

/* NULL if the tensor was not seen as it is now in this step, or not lately, or if that cannot be known. */
static Seen *find_seen(Leaf *leaf, PyObject *tensor, int64_t version, int64_t serial)
{
    for (int i = 0; version >= 0 && i < RECENT; i++) {
        Seen *seen = &leaf->recent[i];
        if (leaf->addresses[i] == tensor && seen->version == version && seen->serial == serial &&
            PyWeakref_GetObject(seen->tensor) == tensor)
            return seen;
    }
    return NULL;
}

static int see_again(Leaf *leaf, Seen *seen, PyObject *tensor, int64_t place, int has_gradient, int recomputed)
{
    if (leaf->output_kind >= 0 && !recomputed) {
        if (seen->row < 0)
            seen->row = take_tensor(leaf->tray, tensor, place | leaf->output_kind);
        else if (!repeat_row(leaf->tray, tensor, seen->row, place | leaf->output_kind))
            return 0;
        if (seen->row == -2)
            return 0;
    }
    if (leaf->gradient_kind < 0 || !has_gradient)
        return 1;
    return seen->targets ? append_number(seen->targets, place | leaf->gradient_kind)
                         : watch_gradient(leaf, tensor, place | leaf->gradient_kind, &seen->targets);
}

static int see_first(Leaf *leaf, Seen *seen, PyObject *tensor, int64_t place, int has_gradient, int recomputed)
{
    if (leaf->output_kind >= 0 && !recomputed) {
        seen->row = take_tensor(leaf->tray, tensor, place | leaf->output_kind);
        if (seen->row == -2)
            return 0;
    }
    return leaf->gradient_kind < 0 || !has_gradient ||
           watch_gradient(leaf, tensor, place | leaf->gradient_kind, &seen->targets);
}

/* In the place of the tensor that was seen longest ago. */
static void keep_seen(Leaf *leaf, PyObject *tensor, const Seen *seen)
{
    int at = leaf->next;
    Seen before = leaf->recent[at];
    leaf->next = (at + 1) % RECENT;
    leaf->recent[at] = *seen;
    leaf->addresses[at] = tensor;
    Py_XDECREF(before.tensor);
    Py_XDECREF(before.targets);
}

static int see(Leaf *leaf, PyObject *tensor, int64_t place, int64_t serial, int recomputed)
{
    int has_gradient = read_flag(tensor, str_requires_grad);
    int64_t version = read_version_if_any(tensor);
    Seen *known = find_seen(leaf, tensor, version, serial), seen = {NULL, NULL, version, serial, -1};
    if (known)
        return see_again(leaf, known, tensor, place, has_gradient, recomputed);
    if (!see_first(leaf, &seen, tensor, place, has_gradient, recomputed) ||
        !(seen.tensor = PyWeakref_NewRef(tensor, NULL))) {
        Py_XDECREF(seen.targets);
        return 0;
    }
    keep_seen(leaf, tensor, &seen);
    return 1;
}

static PyObject *leaf_see(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    Leaf *leaf = (Leaf *)self;
    if (!check_count(n, 3))
        return NULL;
    int64_t place = PyLong_AsLongLong(args[0]) << SITE_SHIFT | PyLong_AsLongLong(args[2]);
    int64_t serial = read_long(leaf->tray->owner->serial), recomputed = read_long(leaf->tray->owner->in_backward);
    if (PyErr_Occurred() || !see(leaf, args[1], place, serial, recomputed != 0))
        return NULL;
    Py_RETURN_NONE;
}

/* Which call of its module in this mode within the step this is: `ModuleEntry.count_call`; -1 where they are not told
   apart any more. */
static long count_call(Place *entry, long serial, int in_eval)
{
    long *counted = in_eval ? &entry->eval_calls : &entry->calls;
    if (entry->serial != serial) {
        entry->serial = serial;
        entry->calls = entry->eval_calls = entry->recalls = entry->eval_recalls = 0;
    }
    return *counted < MAX_CALLS ? (*counted)++ : -1;
}

/* Whether the output of a known module was seen; 0 leaves it to the general way, -1 with an error set. */
static int observe_known(Leaf *leaf, Place *entry, PyObject *output, int64_t tag)
{
    if (!entry->wanted || entry->off)
        return 1;
    long serial = read_long(leaf->tray->owner->serial), ordinal = count_call(entry, serial, tag != 0);
    if (ordinal < 0)
        return 0;
    return see(leaf, output, (int64_t)entry->site << SITE_SHIFT | tag | ordinal, serial, 0) ? 1 : -1;
}

/* Whether the output of a module was seen; 0 leaves it to the general way, -1 with an error set. */
static int observe(Leaf *leaf, PyObject *modules, PyObject *module, PyObject *output, int64_t tag)
{
    const Beat *owner = leaf->tray->owner;
    if ((PyObject *)Py_TYPE(output) != plain_type[0] || owner->probing != Py_False || read_long(owner->in_backward) ||
        owner->asleep != Py_False)
        return 0;
    PyObject *id = PyLong_FromVoidPtr(module), *entry = id ? PyDict_GetItemWithError(modules, id) : NULL;
    Py_XDECREF(id);
    if (!entry || !PyObject_TypeCheck(entry, place_type))
        return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(entry);
    int before = switch_phase(leaf->tray->clock, leaf->tray->clock->own);
    int seen = observe_known(leaf, (Place *)entry, output, tag);
    switch_phase(leaf->tray->clock, before);
    Py_DECREF(entry);
    return seen;
}

/* observe(modules, module, output, tag). */
static PyObject *leaf_observe(PyObject *self, PyObject *const *args, Py_ssize_t n)
{
    if (!check_count(n, 4))
        return NULL;
    int seen = observe((Leaf *)self, args[0], args[1], args[2], PyLong_AsLongLong(args[3]));
    return seen < 0 ? NULL : PyBool_FromLong(seen);
}

static PyObject *leaf_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    forget_seen((Leaf *)self);
    Py_RETURN_NONE;
}

static PyMethodDef leaf_methods[] = {
    FAST("see", leaf_see,
         "see(site, tensor, tag)\n\n"
         "Put an output down as a row and have its gradient put down when it comes. No torch-function mode may be on:\n"
         "it would hear what the tensor is asked."),
    FAST("observe", leaf_observe,
         "observe(modules, module, output, tag) -> bool\n\n"
         "See the output of a module, one that is known, if it is a plain tensor and no probe looks; return whether that is\n"
         "done. No torch-function mode may be on."),
    {"forget", leaf_forget, METH_NOARGS, "forget()\n\nTake any tensor for a new one."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot leaf_slots[] = {
    {Py_tp_doc, "Leaf(tray, anchors, watch, output_kind, gradient_kind)\n\n"
                "Sees the outputs of modules; a kind is -1 where it is not wanted."},
    {Py_tp_new, make_leaf},
    {Py_tp_dealloc, free_leaf},
    {Py_tp_traverse, traverse_leaf},
    {Py_tp_clear, clear_leaf},
    {Py_tp_methods, leaf_methods},
    {0, NULL},
};

static PyType_Spec leaf_spec = {
    "clew.stats._kernel.Leaf", sizeof(Leaf), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, leaf_slots,
};
#endif
