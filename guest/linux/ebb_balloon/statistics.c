// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory statistics: the device keeps one buffer and returns it to request new
 * values (virtio 1.3 section 5.5.6.3).
 */
#include <linux/swap.h>
#include <linux/vmstat.h>

#include "ebb_balloon.h"

/* Tags that are missing in some versions of the kernel's header. */
#define TAG_HTLB_PGALLOC	8
#define TAG_HTLB_PGFAIL		9
#define TAG_OOM_KILL		10
#define TAG_ALLOC_STALL		11
#define TAG_ASYNC_SCAN		12
#define TAG_DIRECT_SCAN		13
#define TAG_ASYNC_RECLAIM	14
#define TAG_DIRECT_RECLAIM	15

static void ebb_put_stat(struct ebb_balloon *eb, unsigned int *count, u16 tag, u64 value)
{
	struct virtio_balloon_stat *stat;

	if (WARN_ON_ONCE(*count >= EBB_STATS))
		return;
	stat = &eb->stats[(*count)++];
	stat->tag = cpu_to_virtio16(eb->vdev, tag);
	stat->val = cpu_to_virtio64(eb->vdev, value);
}

static unsigned int ebb_put_events(struct ebb_balloon *eb, unsigned int count)
{
#ifdef CONFIG_VM_EVENT_COUNTERS
	unsigned long events[NR_VM_EVENT_ITEMS];
	unsigned long stalls = 0;
	unsigned int zone;

	all_vm_events(events);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_SWAP_IN, (u64)events[PSWPIN] << PAGE_SHIFT);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_SWAP_OUT, (u64)events[PSWPOUT] << PAGE_SHIFT);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_MAJFLT, events[PGMAJFAULT]);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_MINFLT, events[PGFAULT]);
#ifdef CONFIG_HUGETLB_PAGE
	ebb_put_stat(eb, &count, TAG_HTLB_PGALLOC, events[HTLB_BUDDY_PGALLOC]);
	ebb_put_stat(eb, &count, TAG_HTLB_PGFAIL, events[HTLB_BUDDY_PGALLOC_FAIL]);
#endif
	/* The stall counters of all zones are adjacent. */
	for (zone = 0; zone < MAX_NR_ZONES; zone++)
		stalls += events[ALLOCSTALL_NORMAL - ZONE_NORMAL + zone];
	ebb_put_stat(eb, &count, TAG_OOM_KILL, events[OOM_KILL]);
	ebb_put_stat(eb, &count, TAG_ALLOC_STALL, stalls);
	ebb_put_stat(eb, &count, TAG_ASYNC_SCAN, (u64)events[PGSCAN_KSWAPD] << PAGE_SHIFT);
	ebb_put_stat(eb, &count, TAG_DIRECT_SCAN, (u64)events[PGSCAN_DIRECT] << PAGE_SHIFT);
	ebb_put_stat(eb, &count, TAG_ASYNC_RECLAIM, (u64)events[PGSTEAL_KSWAPD] << PAGE_SHIFT);
	ebb_put_stat(eb, &count, TAG_DIRECT_RECLAIM, (u64)events[PGSTEAL_DIRECT] << PAGE_SHIFT);
#endif
	return count;
}

/* The queue's only buffer must belong to the driver. */
static int ebb_send_stats(struct ebb_balloon *eb)
{
	struct virtqueue *vq = eb->vqs[EBB_VQ_STATS];
	unsigned int count = 0;
	struct scatterlist sg;
	struct sysinfo info;
	int err;

	si_meminfo(&info);
	count = ebb_put_events(eb, count);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_MEMFREE, (u64)info.freeram << PAGE_SHIFT);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_MEMTOT, (u64)info.totalram << PAGE_SHIFT);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_AVAIL, (u64)si_mem_available() << PAGE_SHIFT);
	ebb_put_stat(eb, &count, VIRTIO_BALLOON_S_CACHES,
		     (u64)global_node_page_state(NR_FILE_PAGES) << PAGE_SHIFT);

	sg_init_one(&sg, eb->stats, count * sizeof(eb->stats[0]));
	err = virtqueue_add_outbuf(vq, &sg, 1, eb, GFP_KERNEL);
	if (!err)
		virtqueue_kick(vq);
	return err;
}

static void ebb_stats_work(struct work_struct *work)
{
	struct ebb_balloon *eb = container_of(work, struct ebb_balloon, stats_work);
	unsigned int len;

	if (!virtqueue_get_buf(eb->vqs[EBB_VQ_STATS], &len)) {
		if (virtqueue_is_broken(eb->vqs[EBB_VQ_STATS]))
			ebb_device_failed(eb);
		return;
	}
	ebb_send_stats(eb);
}

/**
 * ebb_stats_requested() - callback of statsq
 * @vq: the queue
 */
void ebb_stats_requested(struct virtqueue *vq)
{
	struct ebb_balloon *eb = vq->vdev->priv;
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		queue_work(eb->wq, &eb->stats_work);
	spin_unlock_irqrestore(&eb->lock, flags);
}

/**
 * ebb_stats_start() - make the buffer available to the device
 * @eb: the device, which is ready
 *
 * Return: 0, or the error of the queue.
 */
int ebb_stats_start(struct ebb_balloon *eb)
{
	return eb->vqs[EBB_VQ_STATS] ? ebb_send_stats(eb) : 0;
}

void ebb_stats_init(struct ebb_balloon *eb)
{
	INIT_WORK(&eb->stats_work, ebb_stats_work);
}
