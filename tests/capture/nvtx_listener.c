/* A listener of NVTX domain ranges and marks: appends one line per event to the file NVTX_TEST_LOG.
   A tool exports InitializeInjectionNvtx2, asks for the table of a module's callbacks (5 is the
   domain interface) and fills in the entries that it wants. */
#include <stdio.h>
#include <stdlib.h>

struct callbacks { size_t size; int (*table)(unsigned module, void ****entries, unsigned *count); };
struct attributes {
    unsigned short version, size;
    unsigned category;
    int color_type;
    unsigned color;
    int payload_type, reserved;
    unsigned long long payload;
    int message_type;
    const char *message; /* text, or what register_string returned for it: the text again */
};

static FILE *out;

static void *create_domain(const char *name) { return (void *)name; }
static void *register_string(void *domain, const char *text) { (void)domain; return (void *)text; }

static int push(void *domain, const struct attributes *range) {
    fprintf(out, "push %s %s\n", (const char *)domain, range->message);
    return fflush(out);
}

static void mark(void *domain, const struct attributes *event) {
    /* payload types: 1 and 2 are 64-bit integers */
    if (event->payload_type != 1 && event->payload_type != 2) abort();
    fprintf(out, "mark %s %s %lld\n", (const char *)domain, event->message, (long long)event->payload);
    fflush(out);
}

static int pop(void *domain) {
    fprintf(out, "pop %s\n", (const char *)domain);
    return fflush(out);
}

int InitializeInjectionNvtx2(const void *(*export_table)(unsigned)) {
    const struct callbacks *callbacks = export_table(1);
    void ***entries;
    unsigned count;
    out = fopen(getenv("NVTX_TEST_LOG"), "a");
    if (!out || !callbacks || !callbacks->table(5, &entries, &count)) return 0;
    *entries[1] = (void *)mark;
    *entries[4] = (void *)push;
    *entries[5] = (void *)pop;
    *entries[10] = (void *)register_string;
    *entries[12] = (void *)create_domain;
    return 1;
}
