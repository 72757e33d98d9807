#include "tests/gpu-emu/device_body.h"

#include "kernels/cuda/emu/emu.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static char way[128]; /* in which it runs now */

/* What is found ends its own test alone. */
void device_check(device *d, pd_status status, const char *what)
{
    char found[1024];

    if (status == PD_OK && emu_found()[0] == '\0')
        return;
    snprintf(found, sizeof found, "%s", emu_found());
    device_free_all(d);
    emu_forget();
    fail_msg("%s: %s: %s (%s)", what, pd_status_name(status), found, way);
}

int device_setup(void **state)
{
    emu_options options = {.seed = 1};

    emu_configure(&options);
    *state = device_open();
    return *state == NULL ? 1 : 0;
}

void device_poison(device *d, void *memory, size_t bytes)
{
    (void)d, (void)memory, (void)bytes; /* the emulator's is poisoned already */
}

/* --- sectors and wavefronts --- */

/* What a comment at the place, or in the two lines above, allows: "sectors 2: why". */
static double allowed(const char *place, const char *word)
{
    char path[512], line[512];
    const char *root = getenv("KVFERRY_SOURCE"), *colon = strrchr(place, ':');
    long number = colon != NULL ? strtol(colon + 1, NULL, 10) : 0, at = 0;
    double most = 1;
    FILE *file;

    while (strncmp(place, "../", 3) == 0)
        place += 3;
    if (root == NULL || number == 0)
        return most;
    snprintf(path, sizeof path, "%s/%.*s", root, (int)(strrchr(place, ':') - place), place);
    file = fopen(path, "re");
    if (file == NULL)
        return most;
    while (at < number && fgets(line, sizeof line, file) != NULL) {
        const char *said = ++at >= number - 2 ? strstr(line, word) : NULL;
        if (said != NULL)
            most = strtod(said + strlen(word), NULL);
    }
    fclose(file);
    return most;
}

static void look(void *ctx, const emu_traffic *t)
{
    const char *unit = t->shared ? "wavefronts " : "sectors ";
    double ratio = (double)t->actual / (double)t->ideal;
    int *bad = ctx;

    if (t->groups < 8 || ratio <= 1.02 || ratio <= allowed(t->place, unit) * 1.02)
        return;
    ++*bad;
    print_message("# %s: %s%.2f of the ideal, %llu accesses of a warp (%s)\n", t->place, unit,
                  ratio, (unsigned long long)t->groups, t->kernel);
}

/* The checked form: every place of a kernel moves no more than it must, or its source says why. */
static int traffic_is_ideal(void)
{
    int bad = 0;

    emu_traffic_each(look, &bad);
    return bad == 0;
}

int device_teardown(void **state)
{
    device *d = *state;
    bool ideal = traffic_is_ideal();

    device_close(d);
    return ideal ? 0 : 1;
}

void device_run_late(bool late)
{
    emu_options options = {.seed = 1, .late_streams = late};

    emu_configure(&options);
}

static void once(device *d, emu_options options, void (*run)(device *d, void *ctx), void *ctx)
{
    static const char *const orders[] = {"forward", "reverse", "random"};

    snprintf(way, sizeof way, "order %s, copies %s, streams %s, seed %llu", orders[options.order],
             options.late_copies ? "late" : "early", options.late_streams ? "late" : "early",
             (unsigned long long)options.seed);
    emu_configure(&options);
    run(d, ctx);
    device_clear(d);
}

void device_each(device *d, unsigned seeds, void (*run)(device *d, void *ctx), void *ctx)
{
    const char *full = getenv("KVFERRY_FULL"), *seed = getenv("KVFERRY_SEED");
    uint64_t from = seed != NULL ? strtoull(seed, NULL, 10) : 1;

    if (full != NULL && full[0] == '1')
        seeds *= 8;
    once(d, (emu_options){.order = EMU_FORWARD, .seed = from}, run, ctx);
    once(d, (emu_options){.order = EMU_REVERSE, .seed = from, .late_copies = true}, run, ctx);
    for (unsigned i = 0; i < seeds; i++)
        for (int late = 0; late < 2; late++)
            once(d,
                 (emu_options){.order = EMU_RANDOM,
                               .seed = from + i,
                               .late_copies = late == 1,
                               .late_streams = i % 2 == 1},
                 run, ctx);
    way[0] = '\0';
}

void device_traffic_clear(device *d)
{
    emu_options options = {.order = EMU_FORWARD, .seed = 1};

    device_finish(d);
    emu_configure(&options); /* the same blocks each time */
    emu_traffic_clear();
}

struct traffic_sum {
    const char *kernel;
    bool shown;
    device_traffic sum;
};

static void add_traffic(void *ctx, const emu_traffic *traffic)
{
    struct traffic_sum *sum = ctx;
    bool shared = traffic->shared;

    if (strstr(traffic->kernel, sum->kernel) == NULL)
        return;
    *(shared ? &sum->sum.wavefronts : &sum->sum.sectors) += traffic->actual;
    *(shared ? &sum->sum.wavefronts_ideal : &sum->sum.sectors_ideal) += traffic->ideal;
    if (sum->shown)
        print_message("# %s: %s: %llu groups, %llu %s, ideally %llu\n", traffic->kernel,
                      traffic->place, (unsigned long long)traffic->groups,
                      (unsigned long long)traffic->actual, shared ? "wavefronts" : "sectors",
                      (unsigned long long)traffic->ideal);
}

device_traffic device_traffic_of(device *d, const char *kernel)
{
    const char *shown = getenv("KVFERRY_TRAFFIC");
    struct traffic_sum sum = {kernel, shown != NULL && shown[0] == '1', {0}};

    device_finish(d);
    emu_traffic_each(add_traffic, &sum);
    return sum.sum;
}
