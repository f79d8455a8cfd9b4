// SPDX-License-Identifier: GPL-2.0-only
/*
 * Recordings of what happens to free pages: what the allocator does itself.
 *
 * Tracepoints show which pages come and go. __isolate_free_page() and its way
 * back have none, and are called by compaction, by memory hotplug and by the
 * kernel's own reporting: return probes are on both. Callers hold the zone's
 * lock around them, so the handlers run under it. Calls of this module are left
 * out, because it writes them down where it makes them.
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
#include "symbols.h"

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

/* Both functions have the same first two arguments. */
static int ebb_record_called(struct kretprobe_instance *instance, struct pt_regs *regs)
{
	struct ebb_record_call *call = (struct ebb_record_call *)instance->data;

	call->page = (struct page *)regs_get_kernel_argument(regs, 0);
	call->order = regs_get_kernel_argument(regs, 1);
	return 0;
}

static void ebb_record_returned(struct kretprobe_instance *instance, enum ebb_event by_reporting,
				enum ebb_event by_another)
{
	struct ebb_record_call *call = (struct ebb_record_call *)instance->data;

	if (within_module(get_kretprobe_retaddr(instance), THIS_MODULE))
		return;
	ebb_record_page(ebb_reporting_at_work() ? by_reporting : by_another, call->page,
			call->order);
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

static struct kretprobe ebb_record_probes[2];

static int ebb_record_probes_add(void)
{
	struct kretprobe *probes[] = { &ebb_record_probes[0], &ebb_record_probes[1] };
	int err;

	/* A probe cannot be registered again as it was left. */
	ebb_record_probes[0] = (struct kretprobe){
		.kp.symbol_name = "__isolate_free_page",
		.entry_handler = ebb_record_called,
		.handler = ebb_record_isolated,
		.data_size = sizeof(struct ebb_record_call),
	};
	ebb_record_probes[1] = (struct kretprobe){
		.kp.symbol_name = "__putback_isolated_page",
		.entry_handler = ebb_record_called,
		.handler = ebb_record_putback,
		.data_size = sizeof(struct ebb_record_call),
	};
	err = register_kretprobes(probes, ARRAY_SIZE(probes));
	if (err)
		pr_warn("isolation cannot be recorded on this kernel (error %d)\n", err);
	return err ? -EOPNOTSUPP : 0;
}

static u64 ebb_record_probes_remove(void)
{
	struct kretprobe *probes[] = { &ebb_record_probes[0], &ebb_record_probes[1] };
	u64 missed = 0;
	unsigned int i;

	unregister_kretprobes(probes, ARRAY_SIZE(probes));
	for (i = 0; i < ARRAY_SIZE(probes); i++)
		missed += probes[i]->nmissed + probes[i]->kp.nmissed;
	return missed;
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
