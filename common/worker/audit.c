#include "common/worker/audit.h"

#include "common/base/log.h"
#include "common/base/mem.h"

pd_status pd_audit_init(pd_audit *audit, uint32_t entries_max, uint32_t waits_max)
{
    *audit = (pd_audit){.entries_max = entries_max, .waits_max = waits_max};
    audit->entries = pd_calloc(entries_max, sizeof *audit->entries);
    audit->waits_for = pd_calloc(waits_max, sizeof *audit->waits_for);
    if (audit->entries != NULL && audit->waits_for != NULL)
        return PD_OK;
    pd_audit_fini(audit);
    return PD_E_NOMEM;
}

void pd_audit_fini(pd_audit *audit)
{
    pd_free(audit->entries);
    pd_free(audit->waits_for);
    *audit = (pd_audit){0};
}

void pd_audit_begin(pd_audit *audit, uint64_t router)
{
    audit->router = router;
    audit->entries_count = audit->waits_count = audit->left_out = 0;
}

void pd_audit_add(pd_audit *audit, const pd_request_key *key, pd_audit_state state, uint32_t blocks)
{
    if (key->router != audit->router)
        return;
    if (audit->entries_count == audit->entries_max) {
        audit->left_out++;
        return;
    }
    audit->entries[audit->entries_count++] =
        (pd_audit_entry){.key = *key, .state = state, .blocks = blocks};
}

void pd_audit_add_left(pd_audit *audit, const pd_request_key *key, uint32_t blocks)
{
    if (audit->entries_count < audit->entries_max)
        audit->entries[audit->entries_count++] =
            (pd_audit_entry){.key = *key, .state = PD_AUDIT_QUARANTINED, .blocks = blocks};
}

void pd_audit_wait_for(pd_audit *audit, uint64_t incarnation)
{
    for (uint32_t i = 0; i < audit->waits_count; i++) {
        if (audit->waits_for[i] == incarnation)
            return;
    }
    /* One too many is named in a later reply, when another has ended. */
    if (incarnation != 0 && audit->waits_count < audit->waits_max)
        audit->waits_for[audit->waits_count++] = incarnation;
}

void pd_audit_send(pd_audit *audit, const pd_role_options *options, const pd_role_sink *sink,
                   uint32_t serial, pd_ledger ledger)
{
    pd_message message = {.kind = PD_MSG_AUDIT_REPLY};

    if (audit->left_out > 0) {
        pd_log_warn("msg=\"an audit is not answered: more is held than it has places for\" "
                    "places=%u left_out=%u",
                    audit->entries_max, audit->left_out);
        return;
    }
    message.audit_reply = (pd_msg_audit_reply){
        .incarnation = options->incarnation,
        .serial = serial,
        .ledger = ledger,
        .entries = audit->entries,
        .entries_count = audit->entries_count,
        .waits_for = audit->waits_for,
        .waits_for_count = audit->waits_count,
    };
    sink->send(sink->ctx, audit->router, &message);
}
