// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reporting everything that is free at once: on request of the host
 * (docs/extension.md section 5), or early (report_early.c).
 *
 * Free blocks are found by a walk, taken out of the allocator a batch at a
 * time, reported, and put back: what a tracker does, without waiting for more
 * to become free. It waits for the host, in a work item of its own.
 */
#include <linux/mm.h>
#include <linux/oom.h>
#include <linux/slab.h>

#include "counts.h"
#include "ebb_balloon.h"
#include "isolate.h"
#include "symbols.h"
#include "walk.h"

/* Number of a request of the driver's own. */
#define EARLY_ID	U64_MAX
/* Time without reports of this kind after the guest was out of memory. */
#define REST		(2 * HZ)
/* Longest time that the guest waits for a report when it is out of memory. */
#define LONGEST_WAIT	(5 * HZ)

/**
 * struct ebb_report_now - what is reported on request
 * @eb: the device
 * @work: reports
 * @lock: protects the next four
 * @wanted: number of the request to carry out, 0 if there is none
 * @page_shift: log2 of the bytes of its smallest blocks
 * @ended: number of the latest request that was carried out
 * @complete: everything that was free then was reported
 * @walk: finds free blocks
 * @batch: blocks that are out of the allocator
 * @oom: waits for reports when the guest is out of memory
 * @notified: it was registered
 * @rest: time until which nothing is reported here
 */
struct ebb_report_now {
	struct ebb_balloon *eb;
	struct work_struct work;
	/* Taken in work items only. */
	spinlock_t lock;
	u64 wanted;
	unsigned int page_shift;
	u64 ended;
	bool complete;
	struct ebb_walk walk;
	struct ebb_batch batch;
	struct notifier_block oom;
	bool notified;
	unsigned long rest;
};

/*
 * Pages of a zone that may be out of the allocator for the time of a report:
 * others allocate meanwhile, and should not find the zone short of memory.
 */
static unsigned long ebb_spare_pages(struct zone *zone)
{
	unsigned long free = zone_page_state(zone, NR_FREE_PAGES);
	unsigned long reserve = low_wmark_pages(zone);

	return free > reserve ? (free - reserve) / 4 : 0;
}

/*
 * Takes some of the blocks that were found out of the allocator, from number
 * @at on. Return: the number of the first one that is left.
 */
static unsigned int ebb_now_fill(struct ebb_report_now *now, unsigned int at)
{
	struct ebb_walk *walk = &now->walk;
	struct page *first;
	struct zone *zone;
	unsigned long spare;

	/* All are in one section, which may have gone since they were found. */
	mutex_lock(&walk->stepping);
	first = pfn_to_online_page(walk->found[at].pfn);
	if (!first) {
		mutex_unlock(&walk->stepping);
		return walk->found_nr;
	}
	zone = page_zone(first);
	now->batch.zone = zone;
	spin_lock_irq(&zone->lock);
	spare = ebb_spare_pages(zone);
	for (; at < walk->found_nr && now->batch.held_count < EBB_REPORT_MAX; at++) {
		const struct ebb_block *block = &walk->found[at];
		unsigned long pages = 1UL << block->order;

		if (pages > spare) {
			/* The rest of this batch's memory comes back first. */
			if (!now->batch.held_count)
				at = walk->found_nr;
			break;
		}
		if (ebb_batch_hold(&now->batch, block) == EBB_HELD) {
			ebb_batch_name(&now->batch, block->pfn, block->order);
			spare -= pages;
		}
	}
	spin_unlock_irq(&zone->lock);
	mutex_unlock(&walk->stepping);
	return at;
}

/*
 * Reports what the last step of the walk found. Returns false if the device is
 * broken, or the guest was out of memory a moment ago.
 */
static bool ebb_now_report(struct ebb_report_now *now, u64 id)
{
	unsigned int at = 0;

	while (at < now->walk.found_nr && READ_ONCE(now->wanted) == id) {
		unsigned long pages = 0;
		unsigned int i;
		int err;

		if (time_before(jiffies, READ_ONCE(now->rest)) || !ebb_report_begin(now->eb))
			return false;
		at = ebb_now_fill(now, at);
		for (i = 0; i < now->batch.named_count; i++)
			pages += 1UL << now->batch.named[i].order;
		err = ebb_batch_report(now->eb, &now->batch);
		ebb_report_end(now->eb);
		if (id == EARLY_ID && !err)
			ebb_count(now->eb, EBB_EARLY_PAGES, pages);
		if (err)
			return false;
	}
	return true;
}

/*
 * The walk does not find blocks that others have taken out of the allocator for a
 * report of their own. Waits until the host has these, too. Returns false if the
 * device is broken.
 */
static bool ebb_now_settle(struct ebb_balloon *eb)
{
	ebb_reporting_wait();
	if (!ebb_report_begin(eb))
		return false;
	ebb_report_end(eb);
	return true;
}

static void ebb_now_work(struct work_struct *work)
{
	struct ebb_report_now *now = container_of(work, struct ebb_report_now, work);
	unsigned int page_shift;
	bool complete;
	u64 id;

	spin_lock(&now->lock);
	id = now->wanted;
	page_shift = now->page_shift;
	spin_unlock(&now->lock);
	if (!id)
		return;

	/* Where blocks cannot be taken directly, alloc_pages() might have to clear them first. */
	complete = now->eb->direct;
	/* Up to an eighth of a zone since Linux 6.7 (nr_pcp_high()). */
	if (complete && id != EARLY_ID)
		ebb_symbols.drain_all_pages(NULL);
	ebb_walk_begin(&now->walk, page_shift);
	while (complete && READ_ONCE(now->wanted) == id && ebb_walk_step(&now->walk)) {
		complete = ebb_now_report(now, id);
		cond_resched();
	}
	if (complete && id != EARLY_ID && READ_ONCE(now->wanted) == id)
		complete = ebb_now_settle(now->eb);

	spin_lock(&now->lock);
	if (now->wanted == id) {
		now->wanted = 0;
		now->ended = id;
		now->complete = complete;
	}
	spin_unlock(&now->lock);
	if (id != EARLY_ID)
		ebb_requests_wake(now->eb);
}

/**
 * ebb_report_now_begin() - report all free blocks
 * @eb: the device
 * @id: number of the request
 * @page_shift: log2 of the bytes of the smallest block of interest
 *
 * A request that is being carried out ends. ebb_requests_wake() is called when
 * this one has ended.
 */
void ebb_report_now_begin(struct ebb_balloon *eb, u64 id, unsigned int page_shift)
{
	struct ebb_report_now *now = eb->report_now;

	spin_lock(&now->lock);
	WRITE_ONCE(now->wanted, id);
	now->page_shift = page_shift;
	spin_unlock(&now->lock);
	/* It may wait for the host for long, also when tasks are frozen: no freezable queue. */
	queue_work(system_unbound_wq, &now->work);
}

/**
 * ebb_report_now_early() - the same without a request of the host
 * @eb: the device
 * @page_shift: log2 of the bytes of the smallest block of interest
 *
 * Nothing is done during such a request.
 */
void ebb_report_now_early(struct ebb_balloon *eb, unsigned int page_shift)
{
	struct ebb_report_now *now = eb->report_now;
	bool idle;

	spin_lock(&now->lock);
	idle = !now->wanted;
	if (idle) {
		WRITE_ONCE(now->wanted, EARLY_ID);
		now->page_shift = page_shift;
	}
	spin_unlock(&now->lock);
	if (idle)
		queue_work(system_unbound_wq, &now->work);
}

/**
 * ebb_report_now_end_early() - wait until nothing is reported early any more
 * @eb: a device for which ebb_report_now_early() is not called meanwhile
 */
void ebb_report_now_end_early(struct ebb_balloon *eb)
{
	struct ebb_report_now *now = eb->report_now;

	spin_lock(&now->lock);
	if (now->wanted == EARLY_ID)
		WRITE_ONCE(now->wanted, 0);
	spin_unlock(&now->lock);
	flush_work(&now->work);
}

/**
 * ebb_report_now_cancel() - report no more blocks
 * @eb: the device
 */
void ebb_report_now_cancel(struct ebb_balloon *eb)
{
	struct ebb_report_now *now = eb->report_now;

	spin_lock(&now->lock);
	WRITE_ONCE(now->wanted, 0);
	spin_unlock(&now->lock);
}

/**
 * ebb_report_now_ended() - look whether a request was carried out
 * @eb: the device
 * @id: its number
 * @complete: whether everything that was free was reported
 *
 * Return: false if it is still being carried out.
 */
bool ebb_report_now_ended(struct ebb_balloon *eb, u64 id, bool *complete)
{
	struct ebb_report_now *now = eb->report_now;
	bool ended;

	spin_lock(&now->lock);
	ended = now->ended == id;
	*complete = now->complete;
	spin_unlock(&now->lock);
	return ended;
}

/* The kernel's own reporting has blocks before and after it reports them. */
static bool ebb_blocks_are_out(void)
{
	return atomic64_read(&ebb_counts.isolated_now) || ebb_reporting_runs();
}

/*
 * What is being reported, here or by a tracker, is missing only for a moment and
 * no reason to kill a program: it is waited for.
 */
static int ebb_now_oom(struct notifier_block *notifier, unsigned long unused, void *data)
{
	struct ebb_report_now *now = container_of(notifier, struct ebb_report_now, oom);
	atomic64_t *reports = &now->eb->counters[EBB_REPORTS];
	unsigned long end = jiffies + LONGEST_WAIT;
	s64 before = atomic64_read(reports);
	unsigned long *freed = data;

	WRITE_ONCE(now->rest, jiffies + REST);
	while (ebb_blocks_are_out() && time_before(jiffies, end)) {
		wait_event_idle_timeout(now->eb->report_wait, atomic64_read(reports) != before,
					msecs_to_jiffies(20));
		if (atomic64_read(reports) != before || !ebb_blocks_are_out()) {
			*freed += 1;
			break;
		}
	}
	return NOTIFY_OK;
}

/**
 * ebb_report_now_init() - prepare for reports, if they were negotiated
 * @eb: the device
 *
 * Return: 0 or an error. ebb_report_now_exit() is needed in both cases.
 */
int ebb_report_now_init(struct ebb_balloon *eb)
{
	struct ebb_report_now *now;

	if (!ebb_offers(eb, VIRTIO_BALLOON_F_REPORTING))
		return 0;
	now = kvzalloc(sizeof(*now), GFP_KERNEL);
	if (!now)
		return -ENOMEM;
	eb->report_now = now;
	now->eb = eb;
	now->batch.marks = true;
	INIT_WORK(&now->work, ebb_now_work);
	spin_lock_init(&now->lock);
	now->rest = jiffies;
	now->oom.notifier_call = ebb_now_oom;
	now->notified = !register_oom_notifier(&now->oom);
	return ebb_walk_init(&now->walk, eb);
}

void ebb_report_now_exit(struct ebb_balloon *eb)
{
	if (!eb->report_now)
		return;
	if (eb->report_now->notified)
		unregister_oom_notifier(&eb->report_now->oom);
	ebb_walk_exit(&eb->report_now->walk);
	kvfree(eb->report_now);
	eb->report_now = NULL;
}

/**
 * ebb_report_now_stop() - wait until nothing is reported any more
 * @eb: a device that was reset
 */
void ebb_report_now_stop(struct ebb_balloon *eb)
{
	if (!eb->report_now)
		return;
	ebb_report_now_cancel(eb);
	cancel_work_sync(&eb->report_now->work);
}
