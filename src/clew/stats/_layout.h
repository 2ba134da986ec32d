/* Tensors whose elements do not lie one after another: which order to read them in, and reading a piece of them. */

#ifndef CLEW_LAYOUT_H
#define CLEW_LAYOUT_H

#include <stdint.h>
#include <string.h>

enum { MAX_DIMS = 64 };

/* Sizes and strides (bytes) from the outermost dimension to the innermost. No dimension: one element. */
typedef struct {
    int dims;
    int64_t size[MAX_DIMS], stride[MAX_DIMS];
} Layout;

/* Drop dimensions of one element and join neighbours that follow each other in memory. */
static void collapse(Layout *layout)
{
    int kept = 0;
    for (int i = 0; i < layout->dims; i++) {
        int64_t size = layout->size[i], stride = layout->stride[i];
        if (size == 1)
            continue;
        if (kept && layout->stride[kept - 1] == size * stride) {
            layout->size[kept - 1] *= size;
            layout->stride[kept - 1] = stride;
        } else {
            layout->size[kept] = size;
            layout->stride[kept++] = stride;
        }
    }
    layout->dims = kept;
}

/* Reorder the dimensions so that reading follows memory; leave out those without stride and return how often they repeat. */
static int64_t follow_memory(Layout *layout)
{
    int64_t repeats = 1;
    int kept = 0;
    for (int i = 0; i < layout->dims; i++) {
        int64_t size = layout->size[i], stride = layout->stride[i];
        int at = kept;
        if (!stride) {
            repeats *= size;
            continue;
        }
        for (; at && layout->stride[at - 1] < stride; at--) {
            layout->size[at] = layout->size[at - 1];
            layout->stride[at] = layout->stride[at - 1];
        }
        layout->size[at] = size;
        layout->stride[at] = stride;
        kept++;
    }
    layout->dims = kept;
    collapse(layout);
    return repeats;
}

static int64_t count_elements(const Layout *layout)
{
    int64_t count = 1;
    for (int i = 0; i < layout->dims; i++)
        count *= layout->size[i];
    return count;
}

static int is_dense(const Layout *layout, int width)
{
    return layout->dims == 0 || (layout->dims == 1 && layout->stride[0] == width);
}

#define COPY_STRIDED(TYPE)                              \
    for (int64_t i = 0; i < n; i++, from += stride) {   \
        TYPE value;                                     \
        memcpy(&value, from, sizeof value);             \
        memcpy(to + i * (int64_t)sizeof value, &value, sizeof value); \
    }

static void copy_run(char *to, const char *from, int64_t n, int64_t stride, int width)
{
    if (stride == width)
        memcpy(to, from, (size_t)(n * width));
    else if (width == 4)
        COPY_STRIDED(uint32_t)
    else if (width == 2)
        COPY_STRIDED(uint16_t)
    else if (width == 8)
        COPY_STRIDED(uint64_t)
    else
        COPY_STRIDED(uint8_t)
}

/* Copy the n elements from position `start` (in the order of the layout) to contiguous memory. */
static void gather(const Layout *layout, const char *data, int64_t start, int64_t n, int width, char *to)
{
    int64_t index[MAX_DIMS];
    int last = layout->dims - 1;
    for (int i = last; i >= 0; i--) {
        index[i] = start % layout->size[i];
        start /= layout->size[i];
        data += index[i] * layout->stride[i];
    }
    while (n) {
        int64_t run = last < 0 ? 1 : layout->size[last] - index[last];
        run = run < n ? run : n;
        copy_run(to, data, run, last < 0 ? width : layout->stride[last], width);
        to += run * width;
        n -= run;
        if (!n)
            return;
        data -= index[last] * layout->stride[last];
        index[last] = 0;
        for (int i = last - 1; i >= 0; i--) {
            data += layout->stride[i];
            if (++index[i] < layout->size[i])
                break;
            data -= layout->size[i] * layout->stride[i];
            index[i] = 0;
        }
    }
}

#endif
