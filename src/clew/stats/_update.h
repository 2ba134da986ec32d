/* What changed since the values before, once per instruction set. A part of _lanes.h, which includes it. */

/* The difference of floats to the previous ones, which become the present ones, in one loop: copying each block afterwards
   took a quarter of the time. */
static void F(exchange)(const float *restrict now, float *restrict old, int n, float *restrict difference)
{
    for (int i = 0; i < n; i++) {
        float value = now[i];
        difference[i] = value - old[i];
        old[i] = value;
    }
}

/* The difference of elements that are not float32 to the previous ones, in float32 or float64. */
static void F(subtract)(const Task *task, const char *new, const char *old, int n, char *to)
{
    float new_floats[BLOCK], old_floats[BLOCK];
    double old_doubles[BLOCK];
    if (task->measured == F32) {
        const float *a = F(as_floats)(new, task->type, n, new_floats);
        const float *b = F(as_floats)(old, task->type, n, old_floats);
        float *d = (float *)(void *)to;
        for (int i = 0; i < n; i++)
            d[i] = a[i] - b[i];
    } else {
        double *d = (double *)(void *)to;
        as_doubles(new, task->type, n, d);
        as_doubles(old, task->type, n, old_doubles);
        for (int i = 0; i < n; i++)
            d[i] -= old_doubles[i];
    }
}

/* The difference to the previous values; these become the present ones. */
static void F(load_update)(const Task *task, int64_t start, int n, char *to)
{
    int width = type_width[task->type];
    const char *new = task->data + start * width;
    char *old = task->old + start * width;
    if (task->type == F32) {
        F(exchange)((const float *)(const void *)new, (float *)(void *)old, n, (float *)(void *)to);
        return;
    }
    for (int at = 0; at < n; at += BLOCK) {
        int some = n - at < BLOCK ? n - at : BLOCK;
        F(subtract)(task, new + at * width, old + at * width, some, to + at * type_width[task->measured]);
    }
    memcpy(old, new, (size_t)n * (size_t)width);
}
