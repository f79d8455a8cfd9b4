// SPDX-License-Identifier: GPL-2.0-only
/*
 * Recordings of what happens to free pages: what the allocator and the driver do.
 *
 * Tracepoints show which pages come and go. __isolate_free_page() and its way
 * back have none, and are called by trackers, by compaction, by memory hotplug
 * and by the balloon: return probes are on both. Callers hold the zone's lock
 * around them, so the handlers run under it. A report of the driver has a
 * return probe as well: so the driver itself knows nothing of recordings.
 *
 * All of them are in place only during a recording. That of pages that are
 * freed directly has none behind the merge: the model knows such pages as
 * coming, and learns from later events that they have arrived.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kprobes.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/ptrace.h>
#include <linux/tracepoint.h>

#include "record.h"
#include "trackers.h"

static void ebb_record_page(enum ebb_event event, struct page *page, unsigned int order)
{
	ebb_record(event, page_zone(page), page_to_pfn(page), order);
}

/* Behind the removal from the free lists, under the zone's lock. */
static void ebb_record_removed(void *unused, struct page *page, unsigned int order,
			       int migratetype, int percpu_refill)
{
	ebb_record_page(EBB_EVENT_REMOVE, page, order);
}

/* Behind the merge, under the zone's lock. */
static void ebb_record_drained(void *unused, struct page *page, unsigned int order,
			       int migratetype)
{
	ebb_record_page(EBB_EVENT_DRAIN, page, order);
}

/* Before the caller of the allocator has the pages. */
static void ebb_record_allocated(void *unused, struct page *page, unsigned int order, gfp_t gfp,
				 int migratetype)
{
	if (page)
		ebb_record_page(EBB_EVENT_ALLOC, page, order);
}

/* Before the pages are on any list. */
static void ebb_record_freed(void *unused, struct page *page, unsigned int order)
{
	ebb_record_page(EBB_EVENT_FREE, page, order);
}

/**
 * struct ebb_record_hook - a probe on a tracepoint
 * @name: the tracepoint's name
 * @probe: what it calls
 * @tracepoint: the tracepoint
 */
struct ebb_record_hook {
	const char *name;
	void *probe;
	struct tracepoint *tracepoint;
};

static struct ebb_record_hook ebb_record_hooks[] = {
	{ .name = "mm_page_alloc_zone_locked", .probe = ebb_record_removed },
	{ .name = "mm_page_pcpu_drain", .probe = ebb_record_drained },
	{ .name = "mm_page_alloc", .probe = ebb_record_allocated },
	{ .name = "mm_page_free", .probe = ebb_record_freed },
};

/* What a probed function was called with. */
struct ebb_record_call {
	struct page *page;
	unsigned int order;
};

/* The first two have the same first two arguments. */
static int ebb_record_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct ebb_record_call *call = (struct ebb_record_call *)instance->data;

	call->page = (struct page *)regs_get_kernel_argument(regs, 0);
	call->order = regs_get_kernel_argument(regs, 1);
	return 0;
}

static void ebb_record_returned(struct kretprobe_instance *instance, enum ebb_event by_tracker,
				enum ebb_event by_another)
{
	struct ebb_record_call *call = (struct ebb_record_call *)instance->data;

	ebb_record_page(ebb_isolates_now() ? by_tracker : by_another, call->page, call->order);
}

static int ebb_record_isolated(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	/* 0 if the zone is short of memory. */
	if ((int)regs_return_value(regs))
		ebb_record_returned(instance, EBB_EVENT_ISOLATE, EBB_EVENT_TAKE);
	return 0;
}

static int ebb_record_putback(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	ebb_record_returned(instance, EBB_EVENT_PUTBACK, EBB_EVENT_GIVE);
	return 0;
}

/* What ebb_report_blocks() was called with. The caller keeps the blocks until it returns. */
struct ebb_record_report {
	const struct ebb_block *blocks;
	unsigned int count;
};

static void ebb_record_blocks(enum ebb_event event, const struct ebb_record_report *report)
{
	unsigned int i;

	for (i = 0; i < report->count; i++)
		ebb_record_page(event, pfn_to_page(report->blocks[i].pfn),
				report->blocks[i].order);
}

static int ebb_record_reports(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct ebb_record_report *report = (struct ebb_record_report *)instance->data;

	report->blocks = (const struct ebb_block *)regs_get_kernel_argument(regs, 1);
	report->count = regs_get_kernel_argument(regs, 2);
	ebb_record_blocks(EBB_EVENT_REPORT, report);
	return 0;
}

static int ebb_record_reported(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	ebb_record_blocks((int)regs_return_value(regs) ? EBB_EVENT_FAILED : EBB_EVENT_ANSWER,
			  (struct ebb_record_report *)instance->data);
	return 0;
}

/* Templates: a probe cannot be registered again as it was left. */
static const struct kretprobe ebb_record_probed[] = {
	{
		.kp.symbol_name = "__isolate_free_page",
		.entry_handler = ebb_record_called,
		.handler = ebb_record_isolated,
		.data_size = sizeof(struct ebb_record_call),
	}, {
		.kp.symbol_name = "__putback_isolated_page",
		.entry_handler = ebb_record_called,
		.handler = ebb_record_putback,
		.data_size = sizeof(struct ebb_record_call),
	}, {
		.kp.symbol_name = "ebb_balloon:ebb_report_blocks",
		.entry_handler = ebb_record_reports,
		.handler = ebb_record_reported,
		.data_size = sizeof(struct ebb_record_report),
	},
};

#define EBB_RECORD_PROBES ARRAY_SIZE(ebb_record_probed)

static struct kretprobe ebb_record_probes[EBB_RECORD_PROBES];

static u64 ebb_record_probes_unregister(unsigned int count)
{
	u64 missed = 0;

	while (count--) {
		unregister_kretprobe(&ebb_record_probes[count]);
		missed += ebb_record_probes[count].nmissed + ebb_record_probes[count].kp.nmissed;
	}
	return missed;
}

static int ebb_record_probes_add(void)
{
	unsigned int i;
	int err;

	for (i = 0; i < EBB_RECORD_PROBES; i++) {
		ebb_record_probes[i] = ebb_record_probed[i];
		err = register_kretprobe(&ebb_record_probes[i]);
		if (err) {
			pr_warn("%s() cannot be recorded on this kernel (error %d)\n",
				ebb_record_probed[i].kp.symbol_name, err);
			ebb_record_probes_unregister(i);
			return -EOPNOTSUPP;
		}
	}
	return 0;
}

static u64 ebb_record_probes_remove(void)
{
	return ebb_record_probes_unregister(EBB_RECORD_PROBES);
}

static void ebb_record_hooks_unregister(unsigned int count)
{
	while (count--)
		tracepoint_probe_unregister(ebb_record_hooks[count].tracepoint,
					    ebb_record_hooks[count].probe, NULL);
	tracepoint_synchronize_unregister();
}

int ebb_record_hooks_add(void)
{
	unsigned int i;
	int err;

	err = ebb_record_probes_add();
	if (err)
		return err;
	for (i = 0; i < ARRAY_SIZE(ebb_record_hooks); i++) {
		struct ebb_record_hook *hook = &ebb_record_hooks[i];

		hook->tracepoint = ebb_tracepoint_find(hook->name);
		if (!hook->tracepoint ||
		    tracepoint_probe_register(hook->tracepoint, hook->probe, NULL)) {
			ebb_record_hooks_unregister(i);
			ebb_record_probes_remove();
			return -EOPNOTSUPP;
		}
	}
	return 0;
}

u64 ebb_record_hooks_remove(void)
{
	ebb_record_hooks_unregister(ARRAY_SIZE(ebb_record_hooks));
	return ebb_record_probes_remove();
}
