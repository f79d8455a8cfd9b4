// SPDX-License-Identifier: GPL-2.0-only
/*
 * Recordings of what happens to free pages: memory, beginning, end, reading.
 *
 * A recording is an array that is filled once: what comes when it is full is
 * only counted, and the model refuses such a recording. It begins with the free
 * blocks of each zone. A zone's events count from the moment on at which its
 * blocks were written down, all under its lock, so that none is missed or seen
 * twice.
 *
 * An event's place comes from one counter. Whatever orders two events, a lock
 * or a page that is passed on, orders their places as well. The end takes a
 * place, too: what is before it is a state that the kernel was in.
 *
 * Lock order: tracker.c's mutex of the driver (of the callers), ebb_recording_mutex, a zone's
 * lock.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/atomic.h>
#include <linux/bitmap.h>
#include <linux/math64.h>
#include <linux/mm.h>
#include <linux/mutex.h>
#include <linux/rcupdate.h>
#include <linux/sched/clock.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/smp.h>
#include <linux/spinlock.h>
#include <linux/time64.h>
#include <linux/tracepoint.h>

#include "record.h"
#include "trackers.h"
#include "zone_map.h"

/* Number of the format; see README.md. */
#define EBB_RECORDING_FORMAT 1

static const char *const ebb_event_names[EBB_EVENTS] = {
	[EBB_EVENT_BLOCK] = "block",
	[EBB_EVENT_KNOWN] = "known",
	[EBB_EVENT_REMOVE] = "remove",
	[EBB_EVENT_DRAIN] = "drain",
	[EBB_EVENT_TAKE] = "take",
	[EBB_EVENT_GIVE] = "give",
	[EBB_EVENT_ISOLATE] = "isolate",
	[EBB_EVENT_PUTBACK] = "putback",
	[EBB_EVENT_ALLOC] = "alloc",
	[EBB_EVENT_FREE] = "free",
	[EBB_EVENT_REPORT] = "report",
	[EBB_EVENT_ANSWER] = "answer",
	[EBB_EVENT_FAILED] = "failed",
	[EBB_EVENT_MARK] = "mark",
	[EBB_EVENT_CLEAR] = "clear",
	[EBB_EVENT_CAPTURE] = "capture",
	[EBB_EVENT_LOST] = "lost",
	[EBB_EVENT_AGAIN] = "again",
	[EBB_EVENT_SCAN] = "scan",
	[EBB_EVENT_FULL] = "full",
	[EBB_EVENT_FLUSH] = "flush",
	[EBB_EVENT_TURN] = "turn",
	[EBB_EVENT_START] = "start",
	[EBB_EVENT_STARTED] = "started",
	[EBB_EVENT_STOP] = "stop",
	[EBB_EVENT_STOPPED] = "stopped",
};

struct ebb_record {
	u64 time_ns;
	u64 pfn;
	u32 cpu;
	u16 zone;
	u8 event;
	u8 order;
};

static_assert(sizeof(struct ebb_record) == 24);

/**
 * struct ebb_recording - a recording
 * @begun_ns: when it began
 * @max: room in @records
 * @used: places that were given away, also those beyond @max
 * @count: number of @records, once it has ended
 * @lost: events that had no place or that a hook has missed, once it has ended
 * @zones: zones whose events count; bits are set under the zone's lock
 * @records: the events
 */
struct ebb_recording {
	u64 begun_ns;
	u64 max;
	atomic64_t used;
	u64 count;
	u64 lost;
	unsigned long *zones;
	struct ebb_record records[];
};

DEFINE_STATIC_KEY_FALSE(ebb_recording);

/* Protects the next three, and makes a reader and the next recording take turns. */
static DEFINE_MUTEX(ebb_recording_mutex);
/* The latest one; NULL before the first. */
static struct ebb_recording *ebb_recording_latest;
static unsigned int ebb_recording_number;
/* The one under way, or NULL. Writers find it through RCU, with preemption off. */
static struct ebb_recording __rcu *ebb_recording_open;

/* Return: false if there is no room. */
static bool ebb_recording_add(struct ebb_recording *recording, enum ebb_event event,
			      unsigned int zone, unsigned long pfn, unsigned int order)
{
	u64 place = atomic64_fetch_inc(&recording->used);

	if (place >= recording->max)
		return false;
	recording->records[place] = (struct ebb_record){
		.time_ns = local_clock(),
		.pfn = pfn,
		.cpu = raw_smp_processor_id(),
		.zone = zone,
		.event = event,
		.order = order,
	};
	return true;
}

void ebb_record_write(enum ebb_event event, struct zone *zone, unsigned long pfn,
		      unsigned int order)
{
	struct ebb_recording *recording;
	unsigned int number = 0;

	preempt_disable_notrace();
	recording = rcu_dereference_sched(ebb_recording_open);
	if (!recording)
		goto out;
	if (zone) {
		number = ebb_zone_number(zone);
		if (!test_bit(number, recording->zones))
			goto out;
	}
	ebb_recording_add(recording, event, number, pfn, order);
out:
	preempt_enable_notrace();
}

void ebb_record_tracker(enum ebb_tracker_change change, enum ebb_tracker which)
{
	static const enum ebb_event events[] = {
		[EBB_TRACKER_STARTS] = EBB_EVENT_START,
		[EBB_TRACKER_STARTED] = EBB_EVENT_STARTED,
		[EBB_TRACKER_STOPS] = EBB_EVENT_STOP,
		[EBB_TRACKER_STOPPED] = EBB_EVENT_STOPPED,
	};

	if (!static_branch_unlikely(&ebb_recording))
		return;
	/* Whatever is freed from here on is seen by the tracker's hooks as well. */
	if (change == EBB_TRACKER_STARTED)
		tracepoint_synchronize_unregister();
	ebb_record(events[change], NULL, which, 0);
}

static bool ebb_recording_add_list(struct ebb_recording *recording, unsigned int zone,
				   unsigned int order, const struct list_head *blocks)
{
	struct page *page;

	list_for_each_entry(page, blocks, buddy_list) {
		if (!ebb_recording_add(recording,
				       PageReported(page) ? EBB_EVENT_KNOWN : EBB_EVENT_BLOCK,
				       zone, page_to_pfn(page), order))
			return false;
	}
	return true;
}

/* Writes down what is free in a zone; its events count from now on. */
static void ebb_recording_add_zone(struct ebb_recording *recording, struct zone *zone)
{
	unsigned int number = ebb_zone_number(zone);
	unsigned int order, type;

	spin_lock_irq(&zone->lock);
	for (order = 0; order <= EBB_LARGEST_ORDER; order++) {
		for (type = 0; type < MIGRATE_TYPES; type++) {
			if (!ebb_recording_add_list(recording, number, order,
						    &zone->free_area[order].free_list[type]))
				goto out;
		}
	}
out:
	set_bit(number, recording->zones);
	spin_unlock_irq(&zone->lock);
}

static struct ebb_recording *ebb_recording_alloc(unsigned int events)
{
	struct ebb_recording *recording;

	recording = kvzalloc(struct_size(recording, records, events), GFP_KERNEL);
	if (!recording)
		return NULL;
	recording->zones = bitmap_zalloc(nr_node_ids * MAX_NR_ZONES, GFP_KERNEL);
	if (!recording->zones) {
		kvfree(recording);
		return NULL;
	}
	recording->begun_ns = local_clock();
	recording->max = events;
	return recording;
}

static void ebb_recording_forget(void)
{
	lockdep_assert_held(&ebb_recording_mutex);

	if (ebb_recording_latest)
		bitmap_free(ebb_recording_latest->zones);
	kvfree(ebb_recording_latest);
	ebb_recording_latest = NULL;
	ebb_recording_number++;
}

static void ebb_recording_unpublish(void)
{
	static_branch_disable(&ebb_recording);
	RCU_INIT_POINTER(ebb_recording_open, NULL);
	/* A writer may be about to fill the place that it has. */
	synchronize_rcu();
}

static void ebb_recording_close(struct ebb_recording *recording)
{
	u64 used;

	/* Takes all places that are left: nothing is written down any more. */
	used = atomic64_fetch_add(recording->max, &recording->used);
	recording->count = min(used, recording->max);
	recording->lost = used - recording->count;

	recording->lost += ebb_record_hooks_remove();
	ebb_recording_unpublish();
}

int ebb_recording_begin(unsigned int events)
{
	struct ebb_recording *recording;
	int nid, i, err;

	recording = ebb_recording_alloc(events);
	if (!recording)
		return -ENOMEM;

	mutex_lock(&ebb_recording_mutex);
	ebb_recording_forget();
	ebb_recording_latest = recording;
	rcu_assign_pointer(ebb_recording_open, recording);
	static_branch_enable(&ebb_recording);
	err = ebb_record_hooks_add();
	if (err) {
		ebb_recording_unpublish();
		ebb_recording_forget();
		goto out;
	}
	for_each_online_node(nid) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(nid)->node_zones[i];

			if (populated_zone(zone))
				ebb_recording_add_zone(recording, zone);
		}
	}
out:
	mutex_unlock(&ebb_recording_mutex);
	return err;
}

void ebb_recording_end(void)
{
	mutex_lock(&ebb_recording_mutex);
	if (rcu_access_pointer(ebb_recording_open))
		ebb_recording_close(ebb_recording_latest);
	mutex_unlock(&ebb_recording_mutex);
}

void ebb_recording_free(void)
{
	ebb_recording_end();
	mutex_lock(&ebb_recording_mutex);
	ebb_recording_forget();
	mutex_unlock(&ebb_recording_mutex);
}

unsigned int ebb_recording_generation(void)
{
	return READ_ONCE(ebb_recording_number);
}

/* The mutex is held from here to the end of a part; so nothing changes or goes meanwhile. */
static void *ebb_recording_start(struct seq_file *m, loff_t *position)
{
	const struct ebb_recording_reader *reader = m->private;

	mutex_lock(&ebb_recording_mutex);
	if (reader->generation != ebb_recording_number)
		return ERR_PTR(-ESTALE);
	if (!ebb_recording_latest)
		return ERR_PTR(-ENODATA);
	if (rcu_access_pointer(ebb_recording_open))
		return ERR_PTR(-EBUSY);
	if (*position == 0)
		return SEQ_START_TOKEN;
	if (*position > ebb_recording_latest->count)
		return NULL;
	return &ebb_recording_latest->records[*position - 1];
}

static void *ebb_recording_next(struct seq_file *m, void *unused, loff_t *position)
{
	++*position;
	if (*position > ebb_recording_latest->count)
		return NULL;
	return &ebb_recording_latest->records[*position - 1];
}

static void ebb_recording_stop(struct seq_file *m, void *unused)
{
	mutex_unlock(&ebb_recording_mutex);
}

static int ebb_recording_show(struct seq_file *m, void *which)
{
	const struct ebb_recording *recording = ebb_recording_latest;
	const struct ebb_record *record = which;
	s64 ns;

	if (which == SEQ_START_TOKEN) {
		seq_printf(m, "ebb_balloon recording %d events %llu lost %llu percpu_entries %u\n",
			   EBB_RECORDING_FORMAT, recording->count, recording->lost,
			   ebb_percpu_entries());
		return 0;
	}
	/* Clocks of CPUs may differ a little. */
	ns = max_t(s64, record->time_ns - recording->begun_ns, 0);
	seq_printf(m, "%s %u %u %llu %u %llu\n", ebb_event_names[record->event], record->zone,
		   record->order, record->pfn, record->cpu, div_u64(ns, NSEC_PER_USEC));
	return 0;
}

const struct seq_operations ebb_recording_seq_ops = {
	.start = ebb_recording_start,
	.next = ebb_recording_next,
	.stop = ebb_recording_stop,
	.show = ebb_recording_show,
};
