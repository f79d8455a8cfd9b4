// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests of the host (docs/extension.md section 5): which pages are free?
 *
 * The driver leaves a buffer with the device, which returns it with a request.
 * The answer is made by a work item that never waits: it stops when its message
 * is under way and goes on when that comes back. Zones are walked in steps,
 * each of them a few thousand page structures under the zone's lock at most,
 * and for some 50 us at most.
 */
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/page-flags.h>
#include <linux/slab.h>

#include "ebb_balloon.h"

/* Blocks that are found in one step. */
#define FOUND_BLOCKS	256
/* Page structures between looks at the clock. */
#define CLOCK_PAGES	32
/* After this time under a zone's lock a step ends. */
#define LOCK_NS		(50 * NSEC_PER_USEC)
/* Longest time that the work item goes on before others have their turn. */
#define TURN_MS		20
/* Time until the buffer is there again after an illegal request: those keep nobody busy. */
#define PENALTY_MS	100

/**
 * struct ebb_host_requests - state of the queue hostreqq
 * @eb: the device
 * @work: answers
 * @post: makes the buffer available after an illegal request
 * @lock: protects the queue and the next three
 * @buffer: what the device writes
 * @buffer_bytes: how much it wrote
 * @received: the buffer came back and was not looked at
 * @sent: the device has the message
 * @id: number of the request that is being answered, 0 if none is
 * @order: smallest blocks of interest
 * @node: where the walk is; MAX_NUMNODES at its end
 * @zone: the zone of that node
 * @pfn: the next page
 * @incomplete: something free could not be named
 * @found: blocks that the last step found
 * @found_nr: how many
 * @found_at: the first one that is not in a message
 * @set: what the next message names
 * @message: the message
 * @walking: held while page structures are looked at
 * @notifier: waits for steps over memory that goes away
 * @notified: it was registered
 */
struct ebb_host_requests {
	struct ebb_balloon *eb;
	struct work_struct work;
	struct delayed_work post;
	/* Taken in interrupts. */
	spinlock_t lock;
	struct virtio_balloon_host_request buffer;
	unsigned int buffer_bytes;
	bool received;
	bool sent;
	u64 id;
	unsigned int order;
	int node;
	int zone;
	unsigned long pfn;
	bool incomplete;
	struct ebb_range found[FOUND_BLOCKS];
	unsigned int found_nr;
	unsigned int found_at;
	struct ebb_set set;
	void *message;
	/* Around each step, so that memory can be seen to go away. */
	struct mutex walking;
	struct notifier_block notifier;
	bool notified;
};

static void post_buffer(struct ebb_host_requests *r)
{
	struct virtqueue *vq = r->eb->vqs[EBB_VQ_HOST_REQUEST];
	struct scatterlist sg;
	unsigned long flags;

	sg_init_one(&sg, &r->buffer, sizeof(r->buffer));
	spin_lock_irqsave(&r->lock, flags);
	if (!virtqueue_add_inbuf(vq, &sg, 1, &r->buffer, GFP_ATOMIC))
		virtqueue_kick(vq);
	spin_unlock_irqrestore(&r->lock, flags);
}

static void post_work(struct work_struct *work)
{
	post_buffer(container_of(to_delayed_work(work), struct ebb_host_requests, post));
}

static void note_longest(struct ebb_balloon *eb, enum ebb_counter counter, s64 ns)
{
	if (ns > atomic64_read(&eb->counters[counter]))
		atomic64_set(&eb->counters[counter], ns);
}

/*
 * Pages that can be passed over together with one that is not free: a large
 * page of somebody, or a block of the balloon. Nothing keeps them as they are;
 * what is passed over by mistake is not named, and that is no mistake.
 */
static unsigned long used_pages(struct page *page)
{
	unsigned long order = 0;

	if (PageHead(page))
		order = compound_order(page);
	else if (PageOffline(page))
		order = page_private(page);
	return order <= EBB_LARGEST_ORDER ? 1UL << order : 1;
}

/* Looks for blocks in memory whose page structures must stay. Returns where it ended. */
static unsigned long walk_locked(struct ebb_host_requests *r, struct zone *zone,
				 unsigned long pfn, unsigned long end)
{
	unsigned int looked = 0;
	unsigned long flags;
	ktime_t start;
	s64 held;

	spin_lock_irqsave(&zone->lock, flags);
	start = ktime_get();
	while (pfn < end && r->found_nr < FOUND_BLOCKS) {
		struct page *page = pfn_to_page(pfn);
		unsigned long pages;

		/* The lock of another zone's page is not held. */
		if (page_zone(page) != zone) {
			pages = 1;
		} else if (!PageBuddy(page)) {
			pages = used_pages(page);
		} else {
			unsigned long order = page_private(page);

			pages = order <= EBB_LARGEST_ORDER ? 1UL << order : 1;
			if (order >= r->order && order <= EBB_LARGEST_ORDER) {
				struct ebb_range *found = &r->found[r->found_nr++];

				found->start = (u64)pfn << EBB_UNIT_SHIFT;
				found->units = (u64)pages << EBB_UNIT_SHIFT;
			}
		}
		/* Blocks of interest begin at multiples of their size. */
		pfn = ALIGN(pfn + pages, 1UL << r->order);
		if (++looked % CLOCK_PAGES == 0 &&
		    ktime_to_ns(ktime_sub(ktime_get(), start)) > LOCK_NS)
			break;
	}
	held = ktime_to_ns(ktime_sub(ktime_get(), start));
	spin_unlock_irqrestore(&zone->lock, flags);

	ebb_count(r->eb, EBB_LOCKS, 1);
	note_longest(r->eb, EBB_LONGEST_LOCK_NS, held);
	note_longest(r->eb, EBB_LONGEST_LOCK_EVER_NS, held);
	return pfn;
}

static void next_zone_to_walk(struct ebb_host_requests *r)
{
	if (++r->zone < MAX_NR_ZONES) {
		r->pfn = 0;
		return;
	}
	r->zone = 0;
	r->pfn = 0;
	r->node = next_online_node(r->node);
}

/* One step of the walk: at most to the end of a section of memory. */
static void walk(struct ebb_host_requests *r)
{
	struct zone *zone = &NODE_DATA(r->node)->node_zones[r->zone];
	unsigned long end;

	if (!populated_zone(zone) || r->pfn >= zone_end_pfn(zone)) {
		next_zone_to_walk(r);
		return;
	}
	r->pfn = ALIGN(max(r->pfn, zone->zone_start_pfn), 1UL << r->order);
	end = min(ALIGN(r->pfn + 1, PAGES_PER_SECTION), zone_end_pfn(zone));

	mutex_lock(&r->walking);
	if (pfn_to_online_page(r->pfn))
		r->pfn = walk_locked(r, zone, r->pfn, end);
	else
		r->pfn = end;
	mutex_unlock(&r->walking);
}

/* Sends what there is; false if the device still has the last message. */
static bool send_answer(struct ebb_host_requests *r, u16 status)
{
	struct ebb_format format = { .encodings = ebb_encodings(r->eb), .bytes = PAGE_SIZE };
	struct virtqueue *vq = r->eb->vqs[EBB_VQ_HOST_REQUEST];
	struct virtio_balloon_msg_hdr like = {
		.command = cpu_to_le16(VIRTIO_BALLOON_CMD_FREE_PAGES),
		.status = cpu_to_le16(status),
		.request_id = cpu_to_le64(r->id),
	};
	struct scatterlist sg;
	unsigned long flags;
	u8 encoding;
	u32 bytes;
	int err;

	if (READ_ONCE(r->sent))
		return false;
	bytes = ebb_set_write(&r->set, &format, &like, r->message, &encoding);
	if (!bytes) {
		/* The parameter "encoding" has changed: what is in the set is left out. */
		r->incomplete = true;
		ebb_set_clear(&r->set);
		bytes = ebb_set_write(&r->set, &format, &like, r->message, &encoding);
	}
	sg_init_one(&sg, r->message, bytes);
	spin_lock_irqsave(&r->lock, flags);
	err = virtqueue_add_outbuf(vq, &sg, 1, r->message, GFP_ATOMIC);
	if (!err) {
		r->sent = true;
		virtqueue_kick(vq);
	}
	spin_unlock_irqrestore(&r->lock, flags);
	if (err)
		return false;

	ebb_count(r->eb, EBB_ANSWER_MESSAGES, 1);
	ebb_count(r->eb, EBB_ANSWER_BYTES, bytes);
	ebb_count(r->eb, EBB_PAGES_NAMED, r->set.units >> EBB_UNIT_SHIFT);
	ebb_set_clear(&r->set);
	return true;
}

/* Moves what was found into the set; false if the set has to be sent first. */
static bool collect(struct ebb_host_requests *r)
{
	struct ebb_format format = { .encodings = ebb_encodings(r->eb), .bytes = PAGE_SIZE };

	while (r->found_at < r->found_nr) {
		struct ebb_range *found = &r->found[r->found_at];
		u64 units = found->units;

		/* Numbers of a large block may fill more than one message. */
		if (format.encodings == BIT(VIRTIO_BALLOON_ENC_PFNS))
			units = min_t(u64, units, ebb_set_room(&r->set, &format));
		if (units && ebb_set_add(&r->set, &format, found->start, units)) {
			found->start += units;
			found->units -= units;
		} else {
			if (r->set.nr)
				return false;
			/* Numbers do not reach that far. */
			r->incomplete = true;
			found->units = 0;
		}
		if (!found->units) {
			r->found_at++;
			ebb_count(r->eb, EBB_BLOCKS_NAMED, 1);
		}
	}
	r->found_nr = 0;
	r->found_at = 0;
	return true;
}

/* One step of an answer. Returns false when the device has to do something first. */
static bool answer(struct ebb_host_requests *r)
{
	if (!collect(r))
		return send_answer(r, VIRTIO_BALLOON_STATUS_MORE);
	if (r->node < MAX_NUMNODES) {
		walk(r);
		return true;
	}
	if (!send_answer(r, r->incomplete ? VIRTIO_BALLOON_STATUS_ABORTED :
			    VIRTIO_BALLOON_STATUS_DONE))
		return false;
	ebb_count(r->eb, r->incomplete ? EBB_ANSWERS_ABORTED : EBB_ANSWERS_DONE, 1);
	r->id = 0;
	return false;
}

static void begin_answer(struct ebb_host_requests *r, u64 id, unsigned int page_shift)
{
	if (r->id)
		ebb_count(r->eb, EBB_ANSWERS_SUPERSEDED, 1);
	ebb_count(r->eb, EBB_REQUESTS, 1);
	/* Of each answer by itself: it also has what the host did to the processor meanwhile. */
	atomic64_set(&r->eb->counters[EBB_LONGEST_LOCK_NS], 0);
	r->id = id;
	r->order = page_shift > PAGE_SHIFT ? page_shift - PAGE_SHIFT : 0;
	r->order = min_t(unsigned int, r->order, EBB_LARGEST_ORDER);
	r->node = first_online_node;
	r->zone = 0;
	r->pfn = 0;
	r->incomplete = false;
	r->found_nr = 0;
	r->found_at = 0;
	ebb_set_clear(&r->set);
}

static bool is_legal(u16 command, u16 page_shift)
{
	if (command == VIRTIO_BALLOON_CMD_CANCEL)
		return !page_shift;
	return command == VIRTIO_BALLOON_CMD_FREE_PAGES &&
	       page_shift >= VIRTIO_BALLOON_MIN_PAGE_SHIFT &&
	       page_shift <= VIRTIO_BALLOON_MAX_PAGE_SHIFT;
}

/* Looks at a buffer that came back, and makes it available again. */
static void take_request(struct ebb_host_requests *r)
{
	struct virtio_balloon_host_request request = {};
	u16 command, page_shift;
	unsigned int bytes = 0;
	bool received;
	u64 id;

	spin_lock_irq(&r->lock);
	received = r->received;
	if (received) {
		request = r->buffer;
		bytes = r->buffer_bytes;
		r->received = false;
	}
	spin_unlock_irq(&r->lock);
	if (!received)
		return;

	command = le16_to_cpu(request.command);
	page_shift = le16_to_cpu(request.page_shift);
	id = le64_to_cpu(request.request_id);
	if (bytes != sizeof(request) || request.reserved || !id || !is_legal(command, page_shift)) {
		ebb_count(r->eb, EBB_BAD_REQUESTS, 1);
		queue_delayed_work(r->eb->wq, &r->post, msecs_to_jiffies(PENALTY_MS));
		return;
	}
	/* Before the first message of the answer, so that the host can stop it. */
	post_buffer(r);
	if (command == VIRTIO_BALLOON_CMD_FREE_PAGES) {
		begin_answer(r, id, page_shift);
	} else if (id == r->id) {
		r->id = 0;
		ebb_count(r->eb, EBB_CANCELS, 1);
	}
}

static void request_work(struct work_struct *work)
{
	struct ebb_host_requests *r = container_of(work, struct ebb_host_requests, work);
	unsigned long end = jiffies + msecs_to_jiffies(TURN_MS);
	ktime_t start = ktime_get();

	while (!READ_ONCE(r->eb->stopping)) {
		take_request(r);
		if (!r->id || !answer(r))
			break;
		if (time_after(jiffies, end)) {
			queue_work(r->eb->wq, work);
			break;
		}
		cond_resched();
	}
	ebb_count(r->eb, EBB_WALK_NS, ktime_to_ns(ktime_sub(ktime_get(), start)));
}

/**
 * ebb_requests_returned() - callback of hostreqq
 * @vq: the queue
 */
void ebb_requests_returned(struct virtqueue *vq)
{
	struct ebb_balloon *eb = vq->vdev->priv;
	struct ebb_host_requests *r = eb->requests;
	unsigned long flags;
	unsigned int bytes;
	void *token;

	spin_lock_irqsave(&r->lock, flags);
	while ((token = virtqueue_get_buf(vq, &bytes))) {
		if (token == &r->buffer) {
			r->buffer_bytes = bytes;
			r->received = true;
		} else {
			r->sent = false;
		}
	}
	spin_unlock_irqrestore(&r->lock, flags);
	if (virtqueue_is_broken(vq))
		ebb_device_failed(eb);

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		queue_work(eb->wq, &r->work);
	spin_unlock_irqrestore(&eb->lock, flags);
}

/* Sections are marked before this is called, so a step that begins now leaves them out. */
static int memory_changes(struct notifier_block *notifier, unsigned long action, void *unused)
{
	struct ebb_host_requests *r = container_of(notifier, struct ebb_host_requests, notifier);

	if (action == MEM_OFFLINE) {
		mutex_lock(&r->walking);
		mutex_unlock(&r->walking);
	}
	return NOTIFY_OK;
}

/**
 * ebb_requests_init() - prepare for requests, if they were negotiated
 * @eb: the device
 *
 * Return: 0 or -ENOMEM. ebb_requests_exit() is needed in both cases.
 */
int ebb_requests_init(struct ebb_balloon *eb)
{
	struct ebb_host_requests *r;

	if (!ebb_offers(eb, VIRTIO_BALLOON_F_HOST_REQUEST_VQ))
		return 0;
	r = kvzalloc(sizeof(*r), GFP_KERNEL);
	if (!r)
		return -ENOMEM;
	eb->requests = r;
	r->eb = eb;
	INIT_WORK(&r->work, request_work);
	INIT_DELAYED_WORK(&r->post, post_work);
	spin_lock_init(&r->lock);
	mutex_init(&r->walking);
	r->set.max = EBB_SET_RANGES;
	r->set.ranges = kvmalloc_array(EBB_SET_RANGES, sizeof(struct ebb_range), GFP_KERNEL);
	r->message = (void *)__get_free_page(GFP_KERNEL);
	if (!r->set.ranges || !r->message)
		return -ENOMEM;
	r->notifier.notifier_call = memory_changes;
	r->notified = !register_memory_notifier(&r->notifier);
	return r->notified ? 0 : -ENOMEM;
}

void ebb_requests_exit(struct ebb_balloon *eb)
{
	struct ebb_host_requests *r = eb->requests;

	if (!r)
		return;
	if (r->notified)
		unregister_memory_notifier(&r->notifier);
	kvfree(r->set.ranges);
	free_page((unsigned long)r->message);
	kvfree(r);
	eb->requests = NULL;
}

/**
 * ebb_requests_start() - leave a buffer for a request with the device
 * @eb: the device, which is ready
 */
void ebb_requests_start(struct ebb_balloon *eb)
{
	struct ebb_host_requests *r = eb->requests;

	if (!r)
		return;
	if (virtqueue_get_vring_size(eb->vqs[EBB_VQ_HOST_REQUEST]) < 2) {
		dev_warn(&eb->vdev->dev, "hostreqq is too short: requests are not answered\n");
		return;
	}
	r->id = 0;
	r->received = false;
	r->sent = false;
	post_buffer(r);
}

/**
 * ebb_requests_stop() - wait until nothing is done for requests any more
 * @eb: a device that was reset
 */
void ebb_requests_stop(struct ebb_balloon *eb)
{
	struct ebb_host_requests *r = eb->requests;

	if (!r)
		return;
	cancel_work_sync(&r->work);
	cancel_delayed_work_sync(&r->post);
	if (eb->vqs[EBB_VQ_HOST_REQUEST]) {
		while (virtqueue_detach_unused_buf(eb->vqs[EBB_VQ_HOST_REQUEST]))
			;
	}
}
