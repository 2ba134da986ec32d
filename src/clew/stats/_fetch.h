/* Gates at the batches of loaders, and at the indices that these are made of; see _gates.h. A batch ends the step before and
   is kept for a replay: with the random states that the step begins with, and with where it came from.

   Includes nothing: it is a part of _kernel.c. */

#ifdef HAVE_CLOCK

enum { MOST_INDICES = 4096 }; /* as in capture/torch/batches.py */
enum { ORIGINS = 0, ORIGIN_TYPE = 1, SOURCES = 2 };

/* ---------------------------------------------------------------- where a batch comes from */

/* What is known of an iterator, or NULL. */
static Source *find_source(PyObject *sources, PyObject *iterator)
{
    PyObject *id = PyLong_FromVoidPtr(iterator), *source = id ? PyDict_GetItemWithError(sources, id) : NULL;
    Py_XDECREF(id);
    return source && PyObject_TypeCheck(source, source_type) ? (Source *)source : NULL;
}

static PyObject *get_part(PyObject *list, Py_ssize_t at)
{
    return PyTuple_Check(list) ? PyTuple_GetItem(list, at) : PyList_GetItem(list, at);
}

/* Pack those of some objects that are numbers; NULL where one is too large. */
static PyObject *pack_numbers(PyObject *list, PyObject *single)
{
    Py_ssize_t size = single ? 1 : PyObject_Size(list), count = 0;
    int64_t numbers[MOST_INDICES];
    size = size < MOST_INDICES ? size : MOST_INDICES;
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *part = single ? single : get_part(list, i);
        if (PyLong_Check(part))
            numbers[count++] = PyLong_AsLongLong(part);
    }
    return PyErr_Occurred() ? NULL : PyBytes_FromStringAndSize((char *)numbers, count * (Py_ssize_t)sizeof *numbers);
}

/* The indices that the next batch of an iterator is made of, as numbers of eight bytes: to hold on to objects would mean to
   touch each of them again, a hundred steps of training later. NULL where they are not plain. */
static PyObject *pack_next(const Source *source)
{
    PyObject *index = PyList_Size(source->pending) > 0 ? PyList_GetItem(source->pending, 0) : Py_None;
    if (PyList_CheckExact(index) || PyTuple_CheckExact(index))
        return pack_numbers(index, NULL);
    return PyList_Check(index) || PyTuple_Check(index) ? NULL : pack_numbers(NULL, index);
}

static PyObject *describe_origin(const Gate *gate, const Source *source, PyObject *addresses)
{
    PyObject *indices = pack_next(source), *position = indices ? PyLong_FromLong(source->position) : NULL, *origin = NULL;
    if (position)
        origin = make_named(PyTuple_GetItem(gate->lists, ORIGIN_TYPE),
                            PyTuple_Pack(4, source->name, position, indices, addresses));
    Py_XDECREF(indices);
    Py_XDECREF(position);
    return origin;
}

/* ---------------------------------------------------------------- a batch that was given */

/* What is put away of a batch, once all of it is there. */
typedef struct {
    PyObject *origin, *given;
} Kept;

static int put_batch(const Gate *gate, Source *source, Shelf *shelf, PyObject *batch, const Kept *kept)
{
    Course *course = (Course *)gate->course;
    set_field(&course->last_batch, Py_NewRef(batch));
    set_field(&course->last_iterator, Py_NewRef(source->ref));
    source->position++;
    return (PyList_Size(source->pending) == 0 || PyList_SetSlice(source->pending, 0, 1, NULL) == 0) &&
           push(PyTuple_GetItem(gate->lists, ORIGINS), kept->origin) && (!shelf || hold(shelf, kept->given));
}

/* Whether a batch can be kept here, if it is plain. */
static int has_usual_place(const Course *course)
{
    const Shelf *shelf = find_shelf(course);
    return PyBytes_Check(course->blocks) && PyDict_Size(course->known) == course->trees &&
           (shelf ? !keeps_batches(shelf) || is_usual_shelf(shelf) : course->snapshots == Py_None);
}

/* 0 with nothing done where the batch is not plain, -1 with an error set after something was. */
static int keep_batch(const Gate *gate, Source *source, PyObject *batch)
{
    Course *course = (Course *)gate->course;
    Shelf *shelf = find_shelf(course);
    Kept kept = {NULL, NULL};
    Weight weight = {.versions = PyList_New(0), .addresses = PyList_New(0)};
    int done = 0;
    if (shelf && !keeps_batches(shelf))
        shelf = NULL;
    if (weight.versions && weight.addresses && has_usual_place(course) && weigh_part(batch, &weight, 0))
        kept.origin = describe_origin(gate, source, weight.addresses);
    if (kept.origin && shelf)
        kept.given = describe_given(shelf, batch, &weight);
    if (kept.origin && (kept.given || !shelf) && take_random(course->blocks, course->spare) && copy_buffers(course->buffers))
        done = put_batch(gate, source, shelf, batch, &kept) ? 1 : -1;
    Py_XDECREF(weight.versions);
    Py_XDECREF(weight.addresses);
    Py_XDECREF(kept.origin);
    Py_XDECREF(kept.given);
    return done;
}

/* ---------------------------------------------------------------- the gate at batches */

/* Whether nothing of the step before is left to be ended by hand. */
static int is_past(const Gate *gate)
{
    const Beat *beat = (const Beat *)gate->beat;
    return beat->closing == Py_True || read_long(beat->backward_at) != read_long(beat->serial) ||
           has_known_optimizers(beat, (const Course *)gate->course, gate->entries);
}

/* Whether an iterator that is known is asked by the loop itself, and nobody is to be told. */
static int is_usual_fetch(const Gate *gate, const Source *source)
{
    const Beat *beat = (const Beat *)gate->beat;
    const Course *course = (const Course *)gate->course;
    return source->position && !beat->fetching && is_recorded_here(beat) && is_empty(beat->on_batch) && course->has_loader &&
           is_past(gate) && has_usual_place(course) && is_unheard(gate->ask);
}

/* End the step before, and take the random states that the loader may draw from: the phase before; -1 where that is not
   quiet, perhaps with an error set. */
static int begin_fetch(const Gate *gate)
{
    Beat *beat = (Beat *)gate->beat;
    Clock *clock = (Clock *)beat->clock;
    Shelf *shelf = find_shelf((Course *)gate->course);
    int before = switch_phase(clock, clock->own), ended = beat->closing == Py_True ? end_quietly(beat) : 1;
    if (ended == 1 && shelf && keeps_batches(shelf))
        ended = take_random(shelf->blocks, shelf->spare);
    switch_phase(clock, ended == 1 ? gate->phase : before);
    return ended == 1 ? before : -1;
}

/* Have the general way keep a batch, or, without one, hear of the end of a loader; the exception that is set goes on. */
static int finish_generally(const Gate *gate, PyObject *iterator, PyObject *batch)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(gate->finish, iterator, batch, NULL); /* which ends with the first NULL */
    if (done) {
        PyErr_Restore(type, error, trace);
    } else { /* Ctrl-C, meanwhile: what was fetched is dropped */
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(trace);
    }
    Py_XDECREF(done);
    return done != NULL;
}

/* The batch that was given, once it is kept; NULL with an exception that is the user's. */
static PyObject *end_fetch(const Gate *gate, Source *source, PyObject *iterator, PyObject *batch, int before)
{
    Beat *beat = (Beat *)gate->beat;
    Clock *clock = (Clock *)beat->clock;
    beat->fetching = 0;
    if (!batch) {
        switch_phase(clock, before);
        if (PyErr_ExceptionMatches(PyExc_StopIteration))
            finish_generally(gate, iterator, NULL);
        return NULL;
    }
    switch_phase(clock, clock->own);
    int kept = keep_batch(gate, source, batch), fine = 1;
    switch_phase(clock, before);
    if (kept < 0 || (PyErr_Occurred() && !is_ours()))
        fine = excuse(gate->fail);
    PyErr_Clear(); /* one that is ours, with nothing done, is met again by the general way */
    if (fine && !kept)
        fine = finish_generally(gate, iterator, batch);
    if (!fine)
        Py_CLEAR(batch);
    return batch;
}

static PyObject *call_fetch(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    PyObject *iterator = PyTuple_Size(args) == 1 && !kwargs ? PyTuple_GetItem(args, 0) : NULL;
    if (beat->asleep != Py_False || (beat->fetching && is_recorded_here(beat)))
        return PyObject_Call(gate->original, args, kwargs);
    Source *source = iterator ? find_source(PyTuple_GetItem(gate->lists, SOURCES), iterator) : NULL;
    int before = source && is_usual_fetch(gate, source) ? begin_fetch(gate) : -1;
    if (PyErr_Occurred() && !excuse(gate->fail))
        return NULL;
    if (before < 0)
        return PyObject_Call(gate->general, args, kwargs);
    Py_INCREF(self);
    Py_INCREF(source);
    beat->fetching = 1;
    PyObject *batch = PyObject_Call(gate->original, args, kwargs);
    batch = end_fetch(gate, source, iterator, batch, before);
    Py_DECREF(source);
    Py_DECREF(self);
    return batch;
}

/* Looked up on an iterator and not called at once, it is the general way. */
static PyObject *bind_fetch(PyObject *self, PyObject *iterator, PyObject *type)
{
    PyObject *general = ((Gate *)self)->general;
    return !iterator || iterator == Py_None ? Py_NewRef(general) : bind(general, iterator, type);
}

MAKES(make_fetch_gate, ORIGINAL | GENERAL | BEAT | FLIGHT | ENTRIES | ASK | FAIL | FINISH | LISTS)

static PyType_Slot fetch_gate_slots[] = {
    {Py_tp_doc, "FetchGate(*, original, general, beat, course, entries, ask, fail, finish, lists, phase)\n\n"
                "The method that gives a loader's next batch: a plain one is kept here. ``entries`` are the optimizers, ``lists``\n"
                "where origins go, their type and the known iterators by identity; ``ask`` returns how many dispatch modes are\n"
                "on. ``finish`` is called with the iterator and a batch that is not plain, or alone where there are no more."},
    GATE_SLOTS(make_fetch_gate),
    {Py_tp_descr_get, bind_fetch},
    {Py_tp_call, call_fetch},
    {0, NULL},
};

/* Called as a function with the iterator, without an object that binds the two. */
static PyType_Spec fetch_gate_spec = {
    "clew.stats._kernel.FetchGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR,
    fetch_gate_slots,
};

/* ---------------------------------------------------------------- the gate at indices */

static PyObject *call_index(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Gate *gate = (Gate *)self;
    Beat *beat = (Beat *)gate->beat;
    PyObject *iterator = PyTuple_Size(args) == 1 && !kwargs ? PyTuple_GetItem(args, 0) : NULL;
    if (beat->asleep != Py_False)
        return PyObject_Call(gate->original, args, kwargs);
    Source *source = iterator && is_recorded_here(beat) ? find_source(gate->entries, iterator) : NULL;
    if (!source) {
        PyErr_Clear();
        return PyObject_Call(gate->general, args, kwargs);
    }
    Py_INCREF(source);
    PyObject *index = PyObject_Call(gate->original, args, kwargs);
    if (index && PyList_Append(source->pending, index) < 0)
        PyErr_Clear();
    Py_DECREF(source);
    return index;
}

MAKES(make_index_gate, ORIGINAL | GENERAL | BEAT | ENTRIES)

static PyType_Slot index_gate_slots[] = {
    {Py_tp_doc, "IndexGate(*, original, general, beat, entries)\n\n"
                "The method that gives the indices which the next batch is made of; ``entries`` are the known iterators by\n"
                "identity."},
    GATE_SLOTS(make_index_gate),
    {Py_tp_descr_get, bind_fetch},
    {Py_tp_call, call_index},
    {0, NULL},
};

static PyType_Spec index_gate_spec = {
    "clew.stats._kernel.IndexGate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_METHOD_DESCRIPTOR,
    index_gate_slots,
};
#endif
