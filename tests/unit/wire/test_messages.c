/* Messages survive the wire unchanged, and outside bytes never do harm. */
#include "common/base/buf.h"
#include "common/base/mem.h"
#include "common/transfer/transfer.h"
#include "common/wire/messages.h"
#include "common/wire/notice.h"
#include "common/wire/unpack.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const pd_request_key KEY = {.router = 0xfedcba9876543210ull, .number = 77, .epoch = 3};
static const uint32_t TOKENS[] = {1, 2, 49151, UINT32_MAX};
static const pd_hash128 HASHES[] = {{1, 2}, {UINT64_MAX, 0}, {0x0123456789abcdefull, 42}};

static const pd_msg_peer PEER = {.name = "decode-1",
                                 .incarnation = 12,
                                 .pid = 4321,
                                 .host = 78,
                                 .started = 555,
                                 .session = 4,
                                 .transfer_address = "q\0r",
                                 .transfer_address_len = 3};

static const pd_msg_placement OTHER_RANKS[] = {
    {.bus = "0000:3d:00.0", .numa_node = -1, .cpus = "0-31"},
    {.numa_node = 1,
     .nic = "eth0",
     .nic_distance = "far or unknown",
     .bound = true,
     .threads = 300,
     .pinned = "0-299"}};

/* The field's number becomes one that there is not. */
static void hide_rank_pids(pd_buf *buf)
{
    static const unsigned char field[] = {0xba, 0x01, 2, 11, 12}; /* 23, packed */
    unsigned char *at = memmem(buf->bytes, buf->len, field, sizeof field);

    assert_non_null(at);
    at[0] = 0xf2; /* 30 */
}

static void fill_moves(pd_message *m)
{
    static const pd_audit_entry entries[] = {
        {.key = {1, 2, 3}, .state = PD_AUDIT_WAITING, .blocks = 0},
        {.key = {1, 4, 1}, .state = PD_AUDIT_QUARANTINED, .blocks = 9}};
    static const uint64_t waits_for[] = {5, UINT64_MAX};

    switch (m->kind) {
    case PD_MSG_PREFILL_STARTED:
        m->prefill_started = (pd_msg_prefill_started){
            .key = KEY, .pull_first = 2, .pull_blocks = TOKENS, .pull_blocks_count = 4};
        break;
    case PD_MSG_LANDED: m->landed = (pd_msg_landed){.key = KEY, .started = true}; break;
    case PD_MSG_REFETCH:
        m->refetch = (pd_msg_refetch){
            .key = KEY, .group = 1, .first_block = 2, .count = 3, .reason = "a seal"};
        break;
    case PD_MSG_SUSPENDED:
        m->suspended = (pd_msg_suspended){.key = KEY, .answered = 4, .kv_tokens = 50, .blocks = 4};
        break;
    case PD_MSG_SHIP_DONE:
        m->ship_done = (pd_msg_ship_done){.key = KEY,
                                          .receiver = 1ull << 61,
                                          .status = PD_E_PEER,
                                          .ship_ms = 2,
                                          .ship_bytes = 1ull << 40,
                                          .reason = "cut",
                                          .may_land = true,
                                          .again = 1,
                                          .shipped_bytes = 1ull << 41};
        break;
    case PD_MSG_AUDIT_REPLY:
        m->audit_reply = (pd_msg_audit_reply){.incarnation = 9,
                                              .serial = 8,
                                              .ledger = {15, 1, 2, 3, 4, 5},
                                              .entries = entries,
                                              .entries_count = 2,
                                              .waits_for = waits_for,
                                              .waits_for_count = 2};
        break;
    case PD_MSG_BIND: m->bind.key = KEY; break;
    case PD_MSG_TARGETS:
        m->targets =
            (pd_msg_targets){.key = KEY, .held_blocks = 1, .blocks = TOKENS, .blocks_count = 4};
        break;
    case PD_MSG_RELEASE: m->release.key = KEY; break;
    case PD_MSG_SHIP_AGAIN:
        m->ship_again = (pd_msg_ship_again){
            .key = KEY, .group = 1, .first_block = 2, .count = 3, .receiver = 1ull << 60};
        break;
    case PD_MSG_SHIP_REQUEST:
        m->ship_request = (pd_msg_ship_request){.key = KEY,
                                                .id = "cmpl-1",
                                                .source_epoch = 2,
                                                .receiver = PEER,
                                                .first_block = 1,
                                                .blocks = TOKENS,
                                                .blocks_count = 4,
                                                .hashes = HASHES,
                                                .hashes_count = 3,
                                                .kv_tokens = 70,
                                                .deadline_ms = 100};
        break;
    case PD_MSG_PULL_END:
        m->pull_end = (pd_msg_pull_end){.key = KEY, .may_land = true, .reason = "gone"};
        break;
    case PD_MSG_AUDIT: m->audit.serial = 3; break;
    default: fail();
    }
}

static void fill(pd_message *m, pd_message_kind kind)
{
    static const pd_step_token steps[] = {
        {.key = {1, 2, 3}, .index = 0, .token = 9, .finish = PD_FINISH_NONE},
        {.key = {1, UINT64_MAX, 3}, .index = 7, .token = 0, .finish = PD_FINISH_LENGTH}};
    static const pd_kv_event events[] = {{PD_KV_STORED, {5, 6}}, {PD_KV_CLEARED, {0, 0}}};
    const pd_sampling sampling = {
        .temperature = 0.7f, .top_p = 0.9f, .top_k = 40, .seed = UINT64_MAX, .choice = 2};

    memset(m, 0, sizeof *m);
    m->kind = kind;
    switch (kind) {
    case PD_MSG_HELLO:
        m->hello = (pd_msg_hello){.wire_version = 1,
                                  .name = "decode-0",
                                  .role = PD_ROLE_DECODE,
                                  .role_epoch = 1,
                                  .incarnation = 99,
                                  .model = "m",
                                  .model_fingerprint = {3, 4},
                                  .layout_fingerprint = 5,
                                  .layout = "f16",
                                  .block_tokens = 16,
                                  .dp_rank = 1,
                                  .context_max = 8192,
                                  .max_batch = 64,
                                  .queue_max = 10,
                                  .blocks = 100,
                                  .backend = "cpu",
                                  .transfer = "ucx/shm",
                                  .transfer_address = "a\0b",
                                  .transfer_address_len = 3,
                                  .pid = 1234,
                                  .host = 77,
                                  .started = 99,
                                  .session = 2,
                                  .clock_ns = 1ull << 62,
                                  .rank_pids = {11, 12},
                                  .rank_pids_count = 2,
                                  .placement = {.bus = "0000:1b:00.0",
                                                .numa_node = 1,
                                                .nic = "mlx5_1 (eth1)",
                                                .nic_distance = "behind one bridge",
                                                .cpus = "0-31,64-95",
                                                .bound = true},
                                  .rank_placements = OTHER_RANKS};
        break;
    case PD_MSG_HEARTBEAT:
        m->heartbeat = (pd_msg_heartbeat){.incarnation = 99,
                                          .role_epoch = 1,
                                          .step = 8,
                                          .busy = true,
                                          .queue_ms = 1.5f,
                                          .running = 2,
                                          .waiting = 3,
                                          .ledger = {15, 1, 2, 3, 4, 5},
                                          .events_sequence = 6,
                                          .warm = true,
                                          .draining = true,
                                          .counts = {1ull << 43, 11, 12, 13, 14, 1ull << 40, 15, 3},
                                          .clock_ns = 3ull << 61};
        break;
    case PD_MSG_LINK:
        m->link = (pd_msg_link){
            .peer = "decode-0", .peer_incarnation = 4, .up = true, .lane = "posix", .reason = ""};
        break;
    case PD_MSG_LEASE_REPLY:
        m->lease_reply = (pd_msg_lease_reply){.key = KEY,
                                              .status = PD_E_OVERLOAD,
                                              .held_blocks = 2,
                                              .blocks = TOKENS,
                                              .blocks_count = 4,
                                              .retry_after_ms = 100,
                                              .bound = true,
                                              .reason = "full"};
        break;
    case PD_MSG_PREFILL_DONE:
        m->prefill_done = (pd_msg_prefill_done){.key = KEY,
                                                .status = PD_OK,
                                                .cached_tokens = 16,
                                                .computed_tokens = 5,
                                                .queue_ms = 1,
                                                .compute_ms = 2,
                                                .ship_ms = 3,
                                                .may_land = true,
                                                .again = 2,
                                                .ship_bytes = 1ull << 40,
                                                .shipped_bytes = 1ull << 42,
                                                .reason = ""};
        break;
    case PD_MSG_DECODE_FAILED:
        m->decode_failed =
            (pd_msg_decode_failed){.key = KEY, .status = PD_E_PEER, .reason = "seal"};
        break;
    case PD_MSG_BYE: m->bye.incarnation = 7; break;
    case PD_MSG_STEP_TOKENS:
        m->step_tokens = (pd_msg_step_tokens){.name = "d",
                                              .incarnation = 1,
                                              .step = 2,
                                              .queue_ms = 3,
                                              .step_ms = 4,
                                              .tokens = steps,
                                              .tokens_count = 2};
        break;
    case PD_MSG_KV_EVENTS:
        m->kv_events = (pd_msg_kv_events){.name = "d",
                                          .incarnation = 1,
                                          .first_sequence = 10,
                                          .events = events,
                                          .events_count = 2,
                                          .snapshot = true};
        break;
    case PD_MSG_WELCOME: m->welcome = (pd_msg_welcome){1, 200, 2000, 3}; break;
    case PD_MSG_REFUSED:
        snprintf(m->refused.reason, PD_REASON_BYTES, "no");
        m->refused.anew = true;
        break;
    case PD_MSG_ROUTER_HEARTBEAT: m->router_heartbeat.router = 5; break;
    case PD_MSG_PEER_UP:
        m->peer_up = (pd_msg_peer_up){.name = "p",
                                      .role = PD_ROLE_PREFILL,
                                      .incarnation = 3,
                                      .transfer_address = "xyz",
                                      .transfer_address_len = 3,
                                      .pid = 1234,
                                      .host = 77,
                                      .started = 88};
        break;
    case PD_MSG_PEER_GONE: m->peer_gone = (pd_msg_peer_gone){.name = "p", .incarnation = 3}; break;
    case PD_MSG_LEASE_REQUEST:
        m->lease_request = (pd_msg_lease_request){.key = KEY,
                                                  .id = "cmpl-1",
                                                  .prompt_tokens = 50,
                                                  .max_tokens = 9,
                                                  .hashes = HASHES,
                                                  .hashes_count = 3,
                                                  .ttl_ms = 1000,
                                                  .sender = PEER,
                                                  .bind = true,
                                                  .priority = -3};
        break;
    case PD_MSG_PREFILL_REQUEST:
        m->prefill_request = (pd_msg_prefill_request){.key = KEY,
                                                      .id = "cmpl-1",
                                                      .tokens = TOKENS,
                                                      .tokens_count = 4,
                                                      .hashes = HASHES,
                                                      .hashes_count = 3,
                                                      .sampling = sampling,
                                                      .end_tokens = TOKENS,
                                                      .end_tokens_count = 2,
                                                      .max_tokens = 5,
                                                      .ship = true,
                                                      .decode = "d",
                                                      .decode_incarnation = 6,
                                                      .deadline_ms = 100,
                                                      .prompt_tokens = 3,
                                                      .priority = 7,
                                                      .pull = PEER,
                                                      .pull_blocks = 2,
                                                      .pull_ms = 50,
                                                      .hold_ms = 60000};
        break;
    case PD_MSG_DECODE_START:
        m->decode_start = (pd_msg_decode_start){.key = KEY,
                                                .id = "cmpl-1",
                                                .tokens = TOKENS,
                                                .tokens_count = 4,
                                                .prompt_tokens = 3,
                                                .sampling = sampling,
                                                .max_tokens = 5,
                                                .landing_ms = 100};
        break;
    case PD_MSG_CANCEL:
        m->cancel.key = KEY;
        m->cancel.unwritten = true;
        m->cancel.keep = true;
        m->cancel.source = 11;
        break;
    case PD_MSG_SNAPSHOT_REQUEST: m->snapshot_request.router = 5; break;
    default: fill_moves(m); break;
    }
}

/* Packing what was unpacked gives the same bytes: no field was lost or changed on the way. */
static void every_message_survives_the_wire(void **state)
{
    pd_buf first, second;

    (void)state;
    pd_buf_init(&first, PD_MESSAGE_BYTES_MAX);
    pd_buf_init(&second, PD_MESSAGE_BYTES_MAX);
    for (int kind = PD_MSG_HELLO; kind < PD_MESSAGE_KINDS; kind++) {
        pd_message in, out;
        pd_message_hold *hold;
        const char *reason;
        fill(&in, (pd_message_kind)kind);
        assert_int_equal(pd_message_pack(&in, &first), PD_OK);
        assert_int_equal(pd_message_unpack(first.bytes, first.len, &out, &hold, &reason), PD_OK);
        assert_int_equal(out.kind, kind);
        assert_int_equal(pd_message_pack(&out, &second), PD_OK);
        assert_int_equal(first.len, second.len);
        assert_memory_equal(first.bytes, second.bytes, first.len);
        pd_message_hold_free(hold);
    }
    pd_buf_fini(&first);
    pd_buf_fini(&second);
}

static void the_values_that_matter_arrive(void **state)
{
    pd_buf buf;
    pd_message in, out;
    pd_message_hold *hold;
    const char *reason;

    (void)state;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    fill(&in, PD_MSG_PREFILL_REQUEST);
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_OK);
    const pd_msg_prefill_request *p = &out.prefill_request;
    assert_true(p->key.router == KEY.router && p->key.number == 77 && p->key.epoch == 3);
    assert_string_equal(p->id, "cmpl-1");
    assert_int_equal(p->tokens_count, 4);
    assert_int_equal(p->tokens[3], UINT32_MAX);
    assert_int_equal(p->hashes_count, 3);
    assert_true(p->hashes[2].lo == 0x0123456789abcdefull && p->hashes[2].hi == 42);
    assert_true(p->sampling.seed == UINT64_MAX && p->sampling.temperature == 0.7f);
    assert_int_equal(p->pull_blocks, 2);
    assert_true(p->ship && p->decode_incarnation == 6);
    pd_message_hold_free(hold);
    pd_buf_fini(&buf);
}

static void damaged_bytes_are_refused_or_harmless(void **state)
{
    uint64_t seed = 20260101;
    unsigned refused = 0;
    pd_buf buf;

    (void)state;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    for (int round = 0; round < 20000; round++) {
        pd_message in, out;
        pd_message_hold *hold;
        const char *reason;
        fill(&in, (pd_message_kind)(PD_MSG_HELLO + (int)(pd_random_next(&seed) %
                                                         (PD_MESSAGE_KINDS - PD_MSG_HELLO))));
        assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
        size_t len = buf.len;
        if (pd_random_next(&seed) % 3 == 0)
            len = pd_random_next(&seed) % (len + 1);
        for (unsigned i = pd_random_next(&seed) % 4; i > 0 && len > 0; i--)
            buf.bytes[pd_random_next(&seed) % len] = (char)pd_random_next(&seed);
        if (pd_message_unpack(buf.bytes, len, &out, &hold, &reason) == PD_OK)
            pd_message_hold_free(hold);
        else
            refused++;
    }
    assert_true(refused > 2000);
    pd_buf_fini(&buf);
}

static void out_of_range_fields_are_refused(void **state)
{
    pd_buf buf;
    pd_message in, out;
    pd_message_hold *hold;
    const char *reason;

    (void)state;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    fill(&in, PD_MSG_HELLO);
    in.hello.name[0] = '\0';
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_E_INVALID);
    assert_string_equal(reason, "name is empty or too long");
    fill(&in, PD_MSG_HELLO);
    snprintf(in.hello.name, PD_NAME_BYTES, "a\nlevel=error");
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_E_INVALID);
    fill(&in, PD_MSG_HELLO);
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    hide_rank_pids(&buf);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_E_INVALID);
    assert_string_equal(reason, "rank_placements and rank_pids differ in number");
    fill(&in, PD_MSG_HEARTBEAT);
    in.heartbeat.queue_ms = -1;
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_E_INVALID);
    fill(&in, PD_MSG_DECODE_START);
    in.decode_start.prompt_tokens = 4;
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    assert_int_equal(pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason), PD_E_INVALID);
    pd_buf_fini(&buf);
}

static void a_message_that_cannot_be_held_loses_nothing(void **state)
{
    pd_buf buf;
    pd_message in, out;
    pd_message_hold *hold = NULL;
    const char *reason;
    long n = 0;

    (void)state;
    pd_buf_init(&buf, PD_MESSAGE_BYTES_MAX);
    fill(&in, PD_MSG_STEP_TOKENS);
    assert_int_equal(pd_message_pack(&in, &buf), PD_OK);
    long live = pd_mem_live();
    for (pd_status status = PD_E_NOMEM; status != PD_OK; n++) {
        pd_mem_fail_at(n);
        status = pd_message_unpack(buf.bytes, buf.len, &out, &hold, &reason);
        pd_mem_fail_at(-1);
        if (status != PD_OK)
            assert_int_equal(pd_mem_live(), live);
        assert_true(n < 50);
    }
    assert_true(n > 1);
    pd_message_hold_free(hold);
    pd_buf_fini(&buf);
}

static void a_notice_survives_and_damage_is_refused(void **state)
{
    unsigned char bytes[PD_TRANSFER_NOTICE_BYTES_MAX];
    uint64_t seals[PD_NOTICE_BLOCKS_MAX], got[PD_NOTICE_BLOCKS_MAX];
    pd_notice in = {.kind = PD_NOTICE_BLOCKS,
                    .groups = 1,
                    .slices = 1,
                    .key = KEY,
                    .sender = 5,
                    .receiver = 6,
                    .group = 2,
                    .first_block = 9,
                    .count = PD_NOTICE_BLOCKS_MAX,
                    .valid_tokens = 11,
                    .seals = seals};
    pd_notice out;

    (void)state;
    for (int i = 0; i < PD_NOTICE_BLOCKS_MAX; i++)
        seals[i] = pd_mix64((uint64_t)i + 1);
    size_t len = pd_notice_pack(&in, bytes);
    assert_int_equal(pd_notice_unpack(bytes, len, got, &out), PD_OK);
    assert_memory_equal(got, seals, sizeof seals);
    assert_true(out.key.router == KEY.router && out.sender == 5 && out.receiver == 6);
    assert_true(out.groups == 1 && out.slices == 1 && out.group == 2 && out.first_block == 9 &&
                out.valid_tokens == 11);
    for (size_t cut = 0; cut < len; cut++)
        assert_int_equal(pd_notice_unpack(bytes, cut, got, &out), PD_E_INVALID);
    in.kind = PD_NOTICE_ABORT;
    in.count = 0;
    in.seals = NULL;
    len = pd_notice_pack(&in, bytes);
    assert_int_equal(pd_notice_unpack(bytes, len, got, &out), PD_OK);
    assert_true(out.kind == PD_NOTICE_ABORT && out.seals == NULL);
    bytes[0] ^= 1;
    assert_int_equal(pd_notice_unpack(bytes, len, got, &out), PD_E_INVALID);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_message_survives_the_wire),
        cmocka_unit_test(the_values_that_matter_arrive),
        cmocka_unit_test(damaged_bytes_are_refused_or_harmless),
        cmocka_unit_test(out_of_range_fields_are_refused),
        cmocka_unit_test(a_message_that_cannot_be_held_loses_nothing),
        cmocka_unit_test(a_notice_survives_and_damage_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
