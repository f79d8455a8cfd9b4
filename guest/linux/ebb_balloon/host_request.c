// SPDX-License-Identifier: GPL-2.0-only
/*
 * Requests of the host (docs/extension.md section 5): which pages are free? And:
 * report those that are.
 *
 * The driver leaves a buffer with the device, which returns it with a request.
 * The answer is made by a work item that never waits: it stops when its message
 * is under way and goes on when that comes back.
 */
#include <linux/mmzone.h>
#include <linux/slab.h>

#include "ebb_balloon.h"
#include "walk.h"

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
 * @reports: it is one to report free pages, not to name them
 * @walk: finds free blocks
 * @found_at: the first block that is not whole in a message
 * @found_units: how much of it is in one
 * @incomplete: something free could not be named
 * @set: what the next message names
 * @message: the message
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
	bool reports;
	struct ebb_walk walk;
	unsigned int found_at;
	u64 found_units;
	bool incomplete;
	struct ebb_set set;
	void *message;
};

static void ebb_request_post(struct ebb_host_requests *r)
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

static void ebb_request_post_work(struct work_struct *work)
{
	ebb_request_post(container_of(to_delayed_work(work), struct ebb_host_requests, post));
}

/* Sends what there is; false if the device still has the last message. */
static bool ebb_answer_send(struct ebb_host_requests *r, u16 status)
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
static bool ebb_answer_collect(struct ebb_host_requests *r)
{
	struct ebb_format format = { .encodings = ebb_encodings(r->eb), .bytes = PAGE_SIZE };

	while (r->found_at < r->walk.found_nr) {
		const struct ebb_block *found = &r->walk.found[r->found_at];
		u64 start = ((u64)found->pfn << EBB_UNIT_SHIFT) + r->found_units;
		u64 left = (1ULL << found->order << EBB_UNIT_SHIFT) - r->found_units;
		u64 units = left;

		/* Numbers of a large block may fill more than one message. */
		if (format.encodings == BIT(VIRTIO_BALLOON_ENC_PFNS))
			units = min_t(u64, units, ebb_set_room(&r->set, &format));
		if (units && ebb_set_add(&r->set, &format, start, units)) {
			r->found_units += units;
		} else {
			if (r->set.nr)
				return false;
			/* Numbers do not reach that far. */
			r->incomplete = true;
			units = left;
		}
		if (units == left) {
			r->found_at++;
			r->found_units = 0;
			ebb_count(r->eb, EBB_BLOCKS_NAMED, 1);
		}
	}
	r->found_at = 0;
	return true;
}

/* The last message of an answer. Always returns false: the device has to do something next. */
static bool ebb_answer_end(struct ebb_host_requests *r, bool complete)
{
	if (ebb_answer_send(r, complete ? VIRTIO_BALLOON_STATUS_DONE :
					  VIRTIO_BALLOON_STATUS_ABORTED)) {
		ebb_count(r->eb, complete ? EBB_ANSWERS_DONE : EBB_ANSWERS_ABORTED, 1);
		r->id = 0;
	}
	return false;
}

/* One step of an answer. Returns false when the device has to do something first. */
static bool ebb_answer_step(struct ebb_host_requests *r)
{
	bool complete;

	if (r->reports) {
		if (!ebb_report_now_ended(r->eb, r->id, &complete))
			return false;
		return ebb_answer_end(r, complete);
	}
	if (!ebb_answer_collect(r))
		return ebb_answer_send(r, VIRTIO_BALLOON_STATUS_MORE);
	if (ebb_walk_step(&r->walk))
		return true;
	return ebb_answer_end(r, !r->incomplete);
}

/* Ends an answer without a last message. */
static void ebb_answer_drop(struct ebb_host_requests *r, enum ebb_counter why)
{
	if (!r->id)
		return;
	if (r->reports)
		ebb_report_now_cancel(r->eb);
	r->id = 0;
	ebb_count(r->eb, why, 1);
}

static void ebb_answer_begin(struct ebb_host_requests *r, u16 command, u64 id,
			     unsigned int page_shift)
{
	ebb_answer_drop(r, EBB_ANSWERS_SUPERSEDED);
	ebb_count(r->eb, EBB_REQUESTS, 1);
	/* Of each answer by itself: it also has what the host did to the processor meanwhile. */
	atomic64_set(&r->eb->counters[EBB_LONGEST_LOCK_NS], 0);
	r->id = id;
	r->reports = command == VIRTIO_BALLOON_CMD_REPORT;
	ebb_set_clear(&r->set);
	if (r->reports) {
		ebb_report_now_begin(r->eb, id, page_shift);
		return;
	}
	ebb_walk_begin(&r->walk, page_shift);
	r->found_at = 0;
	r->found_units = 0;
	r->incomplete = false;
}

static bool ebb_request_is_legal(struct ebb_balloon *eb, u16 command, u16 page_shift)
{
	if (command == VIRTIO_BALLOON_CMD_CANCEL)
		return !page_shift;
	return (command == VIRTIO_BALLOON_CMD_FREE_PAGES ||
		(command == VIRTIO_BALLOON_CMD_REPORT &&
		 ebb_offers(eb, VIRTIO_BALLOON_F_REPORT_REQUEST))) &&
	       page_shift >= VIRTIO_BALLOON_MIN_PAGE_SHIFT &&
	       page_shift <= VIRTIO_BALLOON_MAX_PAGE_SHIFT;
}

/* Looks at a buffer that came back, and makes it available again. */
static void ebb_request_take(struct ebb_host_requests *r)
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
	if (bytes != sizeof(request) || request.reserved || !id ||
	    !ebb_request_is_legal(r->eb, command, page_shift)) {
		ebb_count(r->eb, EBB_BAD_REQUESTS, 1);
		queue_delayed_work(r->eb->wq, &r->post, msecs_to_jiffies(PENALTY_MS));
		return;
	}
	/* Before the first message of the answer, so that the host can stop it. */
	ebb_request_post(r);
	if (command != VIRTIO_BALLOON_CMD_CANCEL)
		ebb_answer_begin(r, command, id, page_shift);
	else if (id == r->id)
		ebb_answer_drop(r, EBB_CANCELS);
}

static void ebb_request_work(struct work_struct *work)
{
	struct ebb_host_requests *r = container_of(work, struct ebb_host_requests, work);
	unsigned long end = jiffies + msecs_to_jiffies(TURN_MS);
	ktime_t start = ktime_get();

	while (!READ_ONCE(r->eb->stopping)) {
		ebb_request_take(r);
		if (!r->id || !ebb_answer_step(r))
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
 * ebb_requests_wake() - go on with the answer
 * @eb: a device with hostreqq
 */
void ebb_requests_wake(struct ebb_balloon *eb)
{
	unsigned long flags;

	spin_lock_irqsave(&eb->lock, flags);
	if (!eb->stopping)
		queue_work(eb->wq, &eb->requests->work);
	spin_unlock_irqrestore(&eb->lock, flags);
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
	ebb_requests_wake(eb);
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
	INIT_WORK(&r->work, ebb_request_work);
	INIT_DELAYED_WORK(&r->post, ebb_request_post_work);
	spin_lock_init(&r->lock);
	r->set.max = EBB_SET_RANGES;
	r->set.ranges = kvmalloc_array(EBB_SET_RANGES, sizeof(struct ebb_range), GFP_KERNEL);
	r->message = (void *)__get_free_page(GFP_KERNEL);
	if (!r->set.ranges || !r->message)
		return -ENOMEM;
	return ebb_walk_init(&r->walk, eb);
}

void ebb_requests_exit(struct ebb_balloon *eb)
{
	struct ebb_host_requests *r = eb->requests;

	if (!r)
		return;
	ebb_walk_exit(&r->walk);
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
	ebb_request_post(r);
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
