use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::api::migration::MigrationRequest;
use crate::api::vm::SnapshotTarget;
use crate::vm::save::Save;
use crate::vm::task::TaskKind;

fn order(to: &str) -> Order {
    let sockets = (0..2).map(|_| std::os::unix::net::UnixStream::pair().unwrap().0.into());
    Order::new(MigrationRequest::new(to), sockets.collect()).unwrap()
}

fn asked() -> Migrations {
    let migrations = Migrations::default();
    migrations.ask(order("unix:/there")).unwrap();
    migrations
}

/// The next job of the thread for migrations; `None` when it is to end.
fn next_job(migrations: &Migrations) -> Option<Job> {
    match migrations.next_turn(ThreadKind::Migrate, None) {
        Turn::Job(job) => Some(job),
        Turn::Due | Turn::End => None,
    }
}

fn ended(status: MigrationPhase) -> MigrationReport {
    MigrationReport { status, bytes_sent: 7, ..MigrationReport::default() }
}

#[test]
fn one_at_a_time() {
    let migrations = Migrations::default();
    assert_eq!(migrations.status(), MigrationStatus::default());
    assert!(!migrations.is_active());
    migrations.ask(order("unix:/there")).unwrap();
    assert!(migrations.is_active());
    let error = migrations.ask(order("unix:/elsewhere")).unwrap_err();
    assert!(error.to_string().contains("unix:/there"), "{error}");
    assert!(matches!(
        next_job(&migrations),
        Some(Job::Migrate(order)) if order.request.to == "unix:/there"
    ));
    migrations.finish(ended(MigrationPhase::Failed));
    let status = migrations.status();
    assert_eq!((status.phase, status.bytes_sent), (MigrationPhase::Failed, 7));
    assert_eq!(status.report.unwrap().status, MigrationPhase::Failed);
    migrations.ask(order("unix:/elsewhere")).unwrap();
    let status = migrations.status();
    assert_eq!((status.to.as_deref(), status.report), (Some("unix:/elsewhere"), None));
}

#[test]
fn cancelling_reaches_the_migration_at_any_time() {
    let calls = Arc::new(AtomicU32::new(0));
    let count = |calls: &Arc<AtomicU32>| {
        let calls = calls.clone();
        move || {
            calls.fetch_add(1, Ordering::SeqCst);
        }
    };
    let error = Migrations::default().cancel().unwrap_err();
    assert!(error.to_string().contains("no migration"), "{error}");
    for cancel_first in [false, true] {
        let migrations = asked();
        calls.store(0, Ordering::SeqCst);
        if cancel_first {
            migrations.cancel().unwrap();
        }
        migrations.set_cancel(count(&calls));
        if !cancel_first {
            migrations.cancel().unwrap();
        }
        assert_eq!((calls.load(Ordering::SeqCst), migrations.is_cancelled()), (1, true));
        assert!(!migrations.commit(), "committed although it was cancelled");
    }
}

#[test]
fn a_committed_migration_cannot_be_cancelled() {
    let migrations = asked();
    let calls = Arc::new(AtomicU32::new(0));
    let counter = calls.clone();
    migrations.set_cancel(move || {
        counter.fetch_add(1, Ordering::SeqCst);
    });
    assert!(migrations.commit());
    let error = migrations.cancel().unwrap_err();
    assert!(error.to_string().contains("committed"), "{error}");
    migrations.end();
    assert_eq!(calls.load(Ordering::SeqCst), 0);
}

#[test]
fn the_end_of_the_monitor_cancels_and_ends_the_thread() {
    let migrations = asked();
    assert!(next_job(&migrations).is_some());
    migrations.end();
    assert!(migrations.is_cancelled() && !migrations.commit());
    assert!(next_job(&migrations).is_none());
    migrations.finish(ended(MigrationPhase::Cancelled));
    assert!(migrations.ask(order("unix:/there")).is_err());
}

fn task(kind: TaskKind) -> Task {
    Task::new(kind, |_, _| Err(ControlError::failed("not to be done")))
}

fn answer(outcome: Outcome) -> Option<Result<Document, ControlError>> {
    match outcome {
        Outcome::Await(mut wait) => wait.poll(),
        Outcome::Done(document) => Some(Ok(*document)),
    }
}

/// The error for a task that was refused.
fn refused(migrations: &Migrations, kind: TaskKind) -> ControlError {
    migrations.ask_task(task(kind)).err().expect("the task was accepted")
}

#[test]
fn tasks_and_migrations_exclude_each_other() {
    for kind in [TaskKind::Snapshot, TaskKind::Park] {
        let migrations = asked();
        let error = refused(&migrations, kind);
        assert!(error.to_string().contains("migrating"), "{error}");
        assert!(next_job(&migrations).is_some());
        migrations.finish(ended(MigrationPhase::Failed));

        let first = task(kind);
        let ticket = first.ticket().clone();
        let outcome = migrations.ask_task(first).unwrap();
        // Requested, and then being done.
        for _ in 0..2 {
            let migration = migrations.ask(order("unix:/there")).unwrap_err();
            let others =
                [TaskKind::Snapshot, TaskKind::Park].map(|next| refused(&migrations, next));
            for error in others.into_iter().chain([migration]) {
                assert_eq!(error, kind.busy());
            }
            if migrations.lock().request.is_some() {
                assert!(matches!(next_job(&migrations), Some(Job::Task(_))));
            }
        }
        migrations.finish_task(&ticket, Err(ControlError::failed("no room")));
        assert!(matches!(answer(outcome), Some(Err(ControlError::Failed { .. }))));
        migrations.ask(order("unix:/there")).unwrap();
    }
}

#[test]
fn the_thread_for_checkpoints_has_time_when_nothing_else_is_done() {
    let migrations = Migrations::default();
    let turn = |due: Duration| migrations.next_turn(ThreadKind::Fork, Some(Instant::now() + due));
    assert!(migrations.is_idle() && matches!(turn(Duration::from_millis(1)), Turn::Due));
    let checkpoint = task(TaskKind::Checkpoint);
    let ticket = checkpoint.ticket().clone();
    let _outcome = migrations.ask_task(checkpoint).unwrap();
    assert!(!migrations.is_idle() && matches!(turn(Duration::ZERO), Turn::Job(Job::Task(_))));
    assert!(!migrations.is_idle() && matches!(turn(Duration::ZERO), Turn::Due));
    migrations.finish_task(&ticket, Err(ControlError::failed("not made")));
    assert!(migrations.is_idle());
    migrations.ask(order("unix:/there")).unwrap();
    // The job is the other thread's.
    assert!(!migrations.is_idle() && matches!(turn(Duration::ZERO), Turn::Due));
    migrations.end();
    assert!(matches!(turn(Duration::from_secs(3600)), Turn::End));
}

#[test]
fn a_client_that_hangs_up_and_the_end_of_the_monitor_cancel_a_task() {
    let migrations = Migrations::default();
    let abandoned = task(TaskKind::Snapshot);
    let ticket = abandoned.ticket().clone();
    let outcome = migrations.ask_task(abandoned).unwrap();
    assert!(!ticket.is_cancelled());
    drop(outcome);
    assert!(ticket.is_cancelled());
    migrations.finish_task(&ticket, Err(ControlError::failed("cancelled")));

    let last = task(TaskKind::Park);
    let ticket = last.ticket().clone();
    let outcome = migrations.ask_task(last).unwrap();
    migrations.end();
    assert!(ticket.is_cancelled());
    assert!(next_job(&migrations).is_none());
    assert!(migrations.ask_task(task(TaskKind::Park)).is_err());
    // Its client is answered although the thread has not taken it.
    let answer = answer(outcome).unwrap();
    assert_eq!(answer.err(), Some(TaskKind::Park.cancelled()));
}

#[test]
fn a_snapshot_needs_exactly_one_descriptor() {
    for count in [0, 2, 3] {
        let files = (0..count).map(|_| tempfile::tempfile().unwrap().into()).collect();
        let error = Save::new(SnapshotTarget { path: "/x".into() }, files, None).err().unwrap();
        assert!(matches!(error, ControlError::Invalid { field: "path", .. }), "{error}");
        assert!(error.to_string().contains("file descriptor"), "{error}");
    }
}
