// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tracker "reporting": the kernel's own free page reporting.
 *
 * mm/page_reporting.c does the work, with the parameters of the series it is
 * from ("mm / virtio: Provide support for free page reporting", v16.1, 2020):
 * 2 s after a block of at least the reporting order was freed it walks the free
 * lists, takes at most 1/16 of each and one batch, in batches of 32, and marks
 * what it reported in the page flags. There is no hook of ours, so frees,
 * captured and lost stay 0. When much becomes free, report_early.c does not wait
 * that long.
 *
 * It never reports blocks smaller than the reporting order, nor zones that are
 * short of memory. The order is the kernel's parameter page_reporting_order.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/page_reporting.h>
#include <linux/scatterlist.h>
#include <linux/workqueue.h>

#include "compat.h"
#include "counts.h"
#include "ebb_balloon.h"

static_assert(PAGE_REPORTING_CAPACITY == EBB_REPORT_MAX);

static struct ebb_balloon *ebb_reporting_eb;
/* Set once: the kernel never disables page_reporting_enabled again. */
static bool ebb_reporting_was_used;

/*
 * The blocks are off the free lists from before this call until after it; the
 * caller does that, one call at a time.
 */
static int ebb_reporting_report(struct page_reporting_dev_info *info, struct scatterlist *sgl,
				unsigned int count)
{
	struct ebb_block blocks[EBB_REPORT_MAX];
	struct scatterlist *sg;
	unsigned long pages = 0;
	unsigned int i;
	int err;

	for_each_sg(sgl, sg, count, i) {
		blocks[i].pfn = page_to_pfn(sg_page(sg));
		blocks[i].order = get_order(sg->length);
		pages += 1UL << blocks[i].order;
	}

	atomic64_inc(&ebb_counts.passes);
	ebb_count_isolated(count, pages);
	err = -EIO;
	if (ebb_report_begin(ebb_reporting_eb)) {
		err = ebb_report_blocks(ebb_reporting_eb, blocks, count);
		/* Before the end of the turn, which wakes those that are out of memory. */
		atomic64_sub(count, &ebb_counts.isolated_now);
		ebb_report_end(ebb_reporting_eb);
	} else {
		atomic64_sub(count, &ebb_counts.isolated_now);
	}

	if (err) {
		atomic64_inc(&ebb_counts.report_errors);
	} else {
		atomic64_add(count, &ebb_counts.reported_blocks);
		atomic64_add(pages, &ebb_counts.reported_pages);
	}
	return err;
}

static struct page_reporting_dev_info ebb_reporting_info = {
	.report = ebb_reporting_report,
};

bool ebb_reporting_at_work(void)
{
	return current_work() == &ebb_reporting_info.work.work;
}

/**
 * ebb_reporting_wait() - wait for a pass of the kernel's own reporting that is under way
 *
 * Its blocks are out of the allocator before it waits for its turn to report. A
 * caller whose turn it is must not wait here.
 */
void ebb_reporting_wait(void)
{
	/* The work item exists since it was used. */
	if (ebb_kernel_marks())
		flush_work(&ebb_reporting_info.work.work);
}

/* Whether a pass of the kernel's own reporting is under way. */
bool ebb_reporting_runs(void)
{
	return ebb_kernel_marks() &&
	       work_busy(&ebb_reporting_info.work.work) & WORK_BUSY_RUNNING;
}

bool ebb_kernel_marks(void)
{
	return READ_ONCE(ebb_reporting_was_used);
}

static int ebb_reporting_start(struct ebb_balloon *eb)
{
	int err;

	if (!IS_ENABLED(CONFIG_PAGE_REPORTING)) {
		pr_warn("this kernel is built without free page reporting\n");
		return -EOPNOTSUPP;
	}
	ebb_reporting_eb = eb;
	ebb_reporting_info.order = EBB_REPORTING_ORDER_UNSPECIFIED;
	err = page_reporting_register(&ebb_reporting_info);
	if (err == -EBUSY)
		pr_warn("free page reporting is in use by another device\n");
	if (err)
		return err;
	WRITE_ONCE(ebb_reporting_was_used, true);
	ebb_early_start(eb);
	return 0;
}

static void ebb_reporting_stop(void)
{
	ebb_early_stop();
	/* waits for a pass that is under way; it puts its pages back itself */
	if (IS_ENABLED(CONFIG_PAGE_REPORTING))
		page_reporting_unregister(&ebb_reporting_info);
}

const struct ebb_tracker_ops ebb_tracker_reporting = {
	.start = ebb_reporting_start,
	.stop = ebb_reporting_stop,
	.show = ebb_early_show,
};
