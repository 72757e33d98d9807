#include "deploy/simulate/suspects.h"

#include "deploy/simulate/clients.h"

#include <stdio.h>
#include <string.h>

static sim_given *given_of(sim_request *request, uint64_t incarnation)
{
    for (uint32_t i = 0; i < SIM_GIVEN_MAX; i++)
        if (request->given[i].incarnation == incarnation)
            return &request->given[i];
    return NULL;
}

void sim_suspects_see_given(sim_router *router, const sim_worker *worker, const pd_message *message)
{
    const pd_request_key *key =
        message->kind == PD_MSG_PREFILL_REQUEST ? &message->prefill_request.key
        : message->kind == PD_MSG_LEASE_REQUEST ? &message->lease_request.key
        : message->kind == PD_MSG_CANCEL        ? &message->cancel.key
                                                : NULL;
    sim_request *request = key == NULL ? NULL : sim_clients_find(router, key->number);

    if (request == NULL)
        return;
    sim_given *given = given_of(request, worker->incarnation);
    if (message->kind == PD_MSG_CANCEL) {
        if (given != NULL && given->epoch == key->epoch)
            given->left = true;
        return;
    }
    if (given != NULL && given->killer != 0)
        return; /* dead already, and that is remembered */
    if (given == NULL)
        given = &request->given[request->given_count++ % SIM_GIVEN_MAX];
    *given = (sim_given){
        .incarnation = worker->incarnation, .worker = worker->index, .epoch = key->epoch};
}

static void see_computed(sim_router *router, const pd_request_key *key, uint64_t from)
{
    sim_request *request = sim_clients_find(router, key->number);
    sim_given *given = request == NULL ? NULL : given_of(request, from);

    if (given != NULL && given->epoch == key->epoch && router_core_has_worker(router->core, from))
        given->heard = true;
}

/* Another one of the same router, at whose worker one died before, was given to this one too. */
static bool has_rival(const sim_world *world, const sim_request *request, uint64_t incarnation)
{
    for (uint32_t i = 0; i < world->requests_count; i++) {
        sim_request *other = &world->requests[i];
        if (other == request || other->router_incarnation != request->router_incarnation ||
            given_of(other, incarnation) == NULL)
            continue;
        for (uint32_t k = 0; k < SIM_GIVEN_MAX; k++)
            if (other->given[k].killer != 0 && other->given[k].incarnation != incarnation)
                return true;
    }
    return false;
}

void sim_suspects_see_death(const sim_worker *worker)
{
    sim_world *world = worker->world;

    for (uint32_t i = 0; i < world->requests_count; i++) {
        sim_given *given = given_of(&world->requests[i], worker->incarnation);
        if (given != NULL)
            given->killer = worker->killer == 0 ? SIM_KILLED_ELSE : worker->killer;
        if (given != NULL && given->killer == i + 1)
            given->rival = has_rival(world, &world->requests[i], worker->incarnation);
    }
}

uint32_t sim_suspects_deaths(const sim_world *world, const sim_request *request)
{
    uint32_t deaths = 0;

    for (uint32_t i = 0; i < SIM_GIVEN_MAX; i++)
        deaths += request->given[i].killer == (uint32_t)(request - world->requests) + 1 &&
                  !request->given[i].left && !request->given[i].rival;
    return deaths;
}

/* The other request of its router that this process died of, which its router knew to be computed
 * there; NULL: there is none. */
static const sim_request *killer_of(sim_world *world, const sim_request *request,
                                    const sim_given *given)
{
    if (given->killer == 0 || given->killer == SIM_KILLED_ELSE)
        return NULL;
    sim_request *killer = &world->requests[given->killer - 1];
    const sim_given *its = given_of(killer, given->incarnation);
    bool known = its != NULL && its->heard;
    return known && killer->router_incarnation == request->router_incarnation ? killer : NULL;
}

/* Of the two that are said to have died one has not: it stood still, or was cut off, for so long
 * that it was taken for dead. */
static bool was_silent(const sim_world *world, const sim_request *request,
                       char names[2][PD_NAME_BYTES])
{
    uint32_t died[2] = {0, 0};

    for (uint32_t i = 0; i < SIM_GIVEN_MAX; i++) {
        const sim_given *given = &request->given[i];
        const char *name = world->workers[given->worker].name;
        if (given->incarnation == 0 || given->killer == 0)
            continue;
        died[0] += strcmp(name, names[0]) == 0;
        died[1] += strcmp(name, names[1]) == 0;
    }
    return strcmp(names[0], names[1]) == 0 ? died[0] < 2 : died[0] == 0 || died[1] == 0;
}

void sim_suspects_judge(sim_world *world, const sim_request *request, const char *message)
{
    char names[2][PD_NAME_BYTES] = {"", ""};
    uint32_t number = (uint32_t)(request - world->requests), processes = 0;
    const sim_request *killer = NULL;
    bool alike = true;

    if (sscanf(message, "request %*s was being computed at %31[^,], and at %31[^, ]", names[0],
               names[1]) != 2)
        sim_broken(world, "request %u: it is not said which workers died: %s", number, message);
    for (uint32_t i = 0; i < SIM_GIVEN_MAX; i++) {
        const sim_given *given = &request->given[i];
        const char *name = world->workers[given->worker].name;
        if (given->incarnation == 0 || (strcmp(name, names[0]) != 0 && strcmp(name, names[1]) != 0))
            continue;
        const sim_request *of = killer_of(world, request, given);
        alike = alike && of != NULL && (processes == 0 || of == killer);
        killer = of;
        processes++;
    }
    if (processes < 2)
        sim_broken(world, "request %u: of the two workers said to have died, %u had it: %s", number,
                   processes, message);
    else if (request->poison == SIM_POISON_NONE && alike)
        world->coverage.innocents++; /* how many there may be the tests say */
    if (processes >= 2 && request->poison == SIM_POISON_NONE) {
        world->coverage.harmless++;
        world->coverage.silent += was_silent(world, request, names);
    }
}

void sim_suspects_see_reply(sim_router *router, const pd_message *message, uint64_t from)
{
    if (message->kind == PD_MSG_PREFILL_STARTED)
        see_computed(router, &message->prefill_started.key, from);
    if (message->kind == PD_MSG_LANDED)
        see_computed(router, &message->landed.key, from);
}
