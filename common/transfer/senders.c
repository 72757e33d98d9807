#include "common/transfer/senders.h"

#include "common/base/log.h"

static uint64_t kept(uint64_t count)
{
    return count < PD_SENDERS_MAX ? count : PD_SENDERS_MAX;
}

bool pd_senders_is_fenced(const pd_senders *senders, uint64_t incarnation)
{
    for (uint64_t i = 0; i < kept(senders->fenced_count); i++) {
        if (senders->fenced[i] == incarnation)
            return true;
    }
    return false;
}

void pd_senders_fence(pd_senders *senders, uint64_t incarnation)
{
    if (!pd_senders_is_fenced(senders, incarnation))
        senders->fenced[senders->fenced_count++ % PD_SENDERS_MAX] = incarnation;
}

bool pd_senders_is_old(pd_senders *senders, const pd_link_head *head)
{
    if (head->sender == 0)
        return false;
    for (uint64_t i = 0; i < kept(senders->newest_count); i++) {
        pd_link_head *newest = &senders->newest[i];
        if (newest->sender != head->sender)
            continue;
        if (head->link > newest->link)
            newest->link = head->link;
        return head->link < newest->link;
    }
    senders->newest[senders->newest_count++ % PD_SENDERS_MAX] = *head;
    return false;
}

void pd_senders_dropped(pd_senders *senders, const pd_link_head *head, size_t bytes)
{
    senders->dropped++;
    if ((senders->dropped & (senders->dropped - 1)) == 0)
        pd_log_info("msg=\"transfer: dropped what came of a sender or link that is gone\" "
                    "sender=%016llx bytes=%zu dropped=%llu",
                    (unsigned long long)head->sender, bytes, (unsigned long long)senders->dropped);
}
