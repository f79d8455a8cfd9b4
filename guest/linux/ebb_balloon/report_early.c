// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reports before the kernel's own reporting gets to them.
 *
 * The kernel looks at free memory two seconds after a block became free, and
 * then reports a sixteenth of each free list at a time: memory comes back over
 * ten seconds. A shorter delay for all of it makes programs slow that allocate
 * and free all the time, since what was just reported has to be provided by
 * the host again.
 *
 * So the delay adapts. Free memory in large blocks is looked at every
 * EARLY_POLL_MS, without a hook in the allocator. When much of it has become
 * free, and then nothing has changed for a while, all of it is reported. If it
 * is in use again soon after that, the report was a mistake, and the next one
 * waits twice as long; if not, the next one waits as short as possible again.
 * Whatever is left is for the kernel's own reporting.
 *
 * Nothing wakes an idle guest: without changes the timer is a deferrable one.
 */
#include <linux/jiffies.h>
#include <linux/mmzone.h>
#include <linux/module.h>
#include <linux/nodemask.h>
#include <linux/seq_file.h>

#include "bounded.h"
#include "ebb_balloon.h"

#define EARLY_POLL_MS		100
#define EARLY_DELAY_MOST_MS	8000
/* Use of reported memory within this time makes the report a mistake. */
#define EARLY_REGRET_MS		4000
/* Looks without any change after which the timer is deferrable. */
#define EARLY_CALM_POLLS	20
/* Memory that is worth a report by itself, and changes that are no news, in bytes. */
#define EARLY_BURST_BYTES	(32UL << 20)
#define EARLY_NOISE_BYTES	(8UL << 20)

static unsigned int report_delay_ms = 100;
ebb_bounded_param(report_delay_ms, report_delay_ms, 0, EARLY_DELAY_MOST_MS, 0644);
MODULE_PARM_DESC(report_delay_ms,
		 "tracker=reporting: least time without changes after which freed memory is reported (default 100; 0: the kernel's own reporting alone)");

/**
 * struct ebb_early - early reports
 * @eb: the device, NULL while there are none
 * @lock: protects all of this; work items take it for their whole run
 * @busy: looks again, soon
 * @idle: the same with a deferrable timer
 * @base: pages in large free blocks that were reported or are not worth it
 * @last: pages in large free blocks at the last change that is news
 * @seen: the same at the last look
 * @calm: looks without any change
 * @changed: time of the last change that is news
 * @reported: time of the last report
 * @trusted: it was not found to be a mistake, and could still be
 * @delay_ms: current delay
 * @reports: reports
 * @regrets: those that were mistakes
 */
static struct ebb_early {
	struct ebb_balloon *eb;
	struct mutex lock;
	struct delayed_work busy;
	struct delayed_work idle;
	unsigned long base;
	unsigned long last;
	unsigned long seen;
	unsigned int calm;
	unsigned long changed;
	unsigned long reported;
	bool trusted;
	unsigned int delay_ms;
	u64 reports;
	u64 regrets;
} early = {
	.lock = __MUTEX_INITIALIZER(early.lock),
};

static unsigned long ebb_large_free_pages(void)
{
	unsigned long pages = 0;
	unsigned int order;
	int node, zone;

	for_each_online_node(node) {
		for (zone = 0; zone < MAX_NR_ZONES; zone++) {
			const struct free_area *areas =
				NODE_DATA(node)->node_zones[zone].free_area;

			for (order = pageblock_order; order <= EBB_LARGEST_ORDER; order++)
				pages += READ_ONCE(areas[order].nr_free) << order;
		}
	}
	return pages;
}

static bool ebb_early_differs(unsigned long a, unsigned long b)
{
	return max(a, b) - min(a, b) > EARLY_NOISE_BYTES >> PAGE_SHIFT;
}

/* Whether it is time for a report. */
static bool ebb_early_look(unsigned int least_ms)
{
	unsigned long free = ebb_large_free_pages();
	unsigned long burst = EARLY_BURST_BYTES >> PAGE_SHIFT;

	early.calm = free == early.seen ? early.calm + 1 : 0;
	early.seen = free;
	if (ebb_early_differs(free, early.last)) {
		early.changed = jiffies;
		early.last = free;
	}
	if (early.trusted && early.base > free && early.base - free >= burst) {
		early.trusted = false;
		early.regrets++;
		early.delay_ms = min(2 * early.delay_ms, EARLY_DELAY_MOST_MS);
	}
	if (early.trusted &&
	    time_after(jiffies, early.reported + msecs_to_jiffies(EARLY_REGRET_MS))) {
		early.trusted = false;
		early.delay_ms = least_ms;
	}
	early.delay_ms = max(early.delay_ms, least_ms);
	early.base = min(early.base, free);
	if (free - early.base < burst ||
	    time_before(jiffies, early.changed + msecs_to_jiffies(early.delay_ms)))
		return false;
	early.base = free;
	early.reported = jiffies;
	early.trusted = true;
	early.reports++;
	return true;
}

static void ebb_early_work(struct work_struct *work)
{
	unsigned int least_ms = READ_ONCE(report_delay_ms);
	unsigned long wait = msecs_to_jiffies(EARLY_POLL_MS);

	mutex_lock(&early.lock);
	if (early.eb) {
		if (least_ms && ebb_early_look(least_ms))
			ebb_report_now_early(early.eb, pageblock_order + PAGE_SHIFT);
		if (!least_ms || early.calm >= EARLY_CALM_POLLS)
			queue_delayed_work(system_freezable_wq, &early.idle, wait);
		else
			queue_delayed_work(system_freezable_wq, &early.busy, wait);
	}
	mutex_unlock(&early.lock);
}

/**
 * ebb_early_start() - begin early reports
 * @eb: a device that can report
 */
void ebb_early_start(struct ebb_balloon *eb)
{
	if (!eb->direct)
		return;
	mutex_lock(&early.lock);
	INIT_DELAYED_WORK(&early.busy, ebb_early_work);
	INIT_DEFERRABLE_WORK(&early.idle, ebb_early_work);
	early.base = ebb_large_free_pages();
	early.last = early.base;
	early.calm = 0;
	early.changed = jiffies;
	early.trusted = false;
	early.delay_ms = 0;
	early.reports = 0;
	early.regrets = 0;
	early.eb = eb;
	queue_delayed_work(system_freezable_wq, &early.busy, msecs_to_jiffies(EARLY_POLL_MS));
	mutex_unlock(&early.lock);
}

/* Ends early reports, and waits for what is being reported. */
void ebb_early_stop(void)
{
	struct ebb_balloon *eb;

	mutex_lock(&early.lock);
	eb = early.eb;
	early.eb = NULL;
	mutex_unlock(&early.lock);
	if (eb) {
		cancel_delayed_work_sync(&early.busy);
		cancel_delayed_work_sync(&early.idle);
		ebb_report_now_end_early(eb);
	}
}

void ebb_early_show(struct seq_file *m)
{
	mutex_lock(&early.lock);
	seq_printf(m, "early_reports %llu\n", early.reports);
	seq_printf(m, "early_regrets %llu\n", early.regrets);
	seq_printf(m, "early_delay_ms %u\n", early.delay_ms);
	mutex_unlock(&early.lock);
}
