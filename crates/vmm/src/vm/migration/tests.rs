use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

fn asked() -> Migrations {
    let migrations = Migrations::default();
    migrations.ask(MigrationRequest::new("unix:/there")).unwrap();
    migrations
}

fn ended(status: MigrationPhase) -> MigrationReport {
    MigrationReport { status, bytes_sent: 7, ..MigrationReport::default() }
}

#[test]
fn one_at_a_time() {
    let migrations = Migrations::default();
    assert_eq!(migrations.status(), MigrationStatus::default());
    assert!(!migrations.is_active());
    migrations.ask(MigrationRequest::new("unix:/there")).unwrap();
    assert!(migrations.is_active());
    let error = migrations.ask(MigrationRequest::new("unix:/elsewhere")).unwrap_err();
    assert!(error.to_string().contains("unix:/there"), "{error}");
    assert_eq!(migrations.next_request().unwrap().to, "unix:/there");
    migrations.finish(ended(MigrationPhase::Failed));
    let status = migrations.status();
    assert_eq!((status.phase, status.bytes_sent), (MigrationPhase::Failed, 7));
    assert_eq!(status.report.unwrap().status, MigrationPhase::Failed);
    migrations.ask(MigrationRequest::new("unix:/elsewhere")).unwrap();
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
    assert!(migrations.next_request().is_some());
    migrations.end();
    assert!(migrations.is_cancelled() && !migrations.commit());
    assert!(migrations.next_request().is_none());
    migrations.finish(ended(MigrationPhase::Cancelled));
    assert!(migrations.ask(MigrationRequest::new("unix:/there")).is_err());
}
