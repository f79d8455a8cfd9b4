// SPDX-License-Identifier: GPL-2.0-only
/*
 * Free page reporting (virtio 1.3 section 5.5.6.7): the driver
 * names blocks that it has isolated from the allocator, and returns them when
 * the host has answered.
 */
#include <linux/export.h>
#include <linux/sched.h>

#include "ebb_balloon.h"

/* Whose turn it is; only for comparison. */
static struct task_struct *ebb_reporter;

/**
 * ebb_report_returned() - callback of reporting_vq
 * @vq: the queue
 */
void ebb_report_returned(struct virtqueue *vq)
{
	struct ebb_balloon *eb = vq->vdev->priv;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&eb->report_lock, flags);
	while (virtqueue_get_buf(vq, &len))
		WRITE_ONCE(eb->report_done, true);
	spin_unlock_irqrestore(&eb->report_lock, flags);
	wake_up_all(&eb->report_wait);
	if (virtqueue_is_broken(vq))
		ebb_device_failed(eb);
}

static int ebb_report_send(struct ebb_balloon *eb, const struct ebb_block *blocks,
			   unsigned int count)
{
	struct virtqueue *vq = eb->vqs[EBB_VQ_REPORTING];
	unsigned int i;
	int err;

	sg_init_table(eb->report_sg, count);
	for (i = 0; i < count; i++)
		sg_set_page(&eb->report_sg[i], pfn_to_page(blocks[i].pfn),
			    PAGE_SIZE << blocks[i].order, 0);

	spin_lock_irq(&eb->report_lock);
	eb->report_done = false;
	err = READ_ONCE(eb->stopping) ? -EIO :
	      virtqueue_add_inbuf(vq, eb->report_sg, count, eb, GFP_ATOMIC | __GFP_NOWARN);
	if (!err)
		virtqueue_kick(vq);
	spin_unlock_irq(&eb->report_lock);
	if (err)
		return -EIO;

	/* A broken device was reset, so the host has nothing to do with the pages any more. */
	wait_event_idle(eb->report_wait, READ_ONCE(eb->report_done) || READ_ONCE(eb->broken));
	if (!READ_ONCE(eb->report_done))
		return -EIO;
	ebb_count(eb, EBB_REPORTS, 1);
	ebb_count(eb, EBB_REPORT_BLOCKS, count);
	return 0;
}

/**
 * ebb_report_begin() - wait for one's turn to isolate and report blocks
 * @eb: the device
 *
 * Only one caller at a time isolates blocks, at most a batch of them: the number
 * of isolated blocks does not grow with the number of CPUs. Sleeps.
 *
 * Return: false if the device is broken; then there is no turn to end.
 */
bool ebb_report_begin(struct ebb_balloon *eb)
{
	/* A mutex would have those complain who wait for a host that never answers. */
	for (;;) {
		if (READ_ONCE(eb->broken))
			return false;
		if (!test_and_set_bit_lock(0, &eb->report_busy)) {
			WRITE_ONCE(ebb_reporter, current);
			return true;
		}
		wait_event_idle(eb->report_wait, READ_ONCE(eb->broken) ||
				!test_bit(0, &eb->report_busy));
	}
}
EXPORT_SYMBOL_GPL(ebb_report_begin);

/**
 * ebb_report_end() - end the turn
 * @eb: the device, after ebb_report_begin() returned true
 */
void ebb_report_end(struct ebb_balloon *eb)
{
	WRITE_ONCE(ebb_reporter, NULL);
	clear_bit_unlock(0, &eb->report_busy);
	wake_up_all(&eb->report_wait);
}
EXPORT_SYMBOL_GPL(ebb_report_end);

/* See tracker.h. */
int ebb_report_blocks(struct ebb_balloon *eb, const struct ebb_block *blocks, unsigned int count)
{
	struct virtqueue *vq = eb->vqs[EBB_VQ_REPORTING];
	unsigned int room;
	int err = 0;

	if (!vq)
		return -EIO;
	room = min_t(unsigned int, virtqueue_get_vring_size(vq), EBB_REPORT_MAX);
	while (count && !err) {
		unsigned int part = min(count, room);

		err = ebb_report_send(eb, blocks, part);
		blocks += part;
		count -= part;
	}
	return err;
}

/* See tracker.h. */
bool ebb_isolates_now(void)
{
	return READ_ONCE(ebb_reporter) == current || ebb_reporting_at_work();
}
EXPORT_SYMBOL_GPL(ebb_isolates_now);
