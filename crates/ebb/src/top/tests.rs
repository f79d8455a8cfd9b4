//! Pictures and keys, without a terminal and without I/O.

mod monitors;

use std::time::Duration;

use ebb_host_policy::report::{MachineStatus, Status};
use ebb_host_policy::{
    Balloon, Cause, Explanation, GIB, Host, Level, MIB, Machine, Means, Rule, Statistics, Swap,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;

use super::act::Act;
use super::documents::Report;
use super::frame::{Colours, draw, plain};
use super::keys::{Effect, Mode};
use super::model::{Model, Sort, Source};

fn machine(name: &str, resident_mib: u64, available_mib: u64) -> MachineStatus {
    let machine = Machine {
        name: name.to_owned(),
        size_bytes: GIB,
        resident_bytes: Some(resident_mib * MIB),
        swapped_bytes: Some(0),
        processor_ms: Some(5),
        is_paused: false,
        balloon: Some(Balloon { target_bytes: 128 * MIB, actual_bytes: 128 * MIB }),
        statistics: Some(Statistics {
            taken_ms: 9000,
            total_bytes: Some(GIB),
            available_bytes: Some(available_mib * MIB),
            free_bytes: Some(available_mib * MIB / 2),
            caches_bytes: None,
            major_faults: None,
            swap_out_bytes: None,
            oom_kills: None,
        }),
        means: Means::default(),
    };
    MachineStatus {
        name: name.to_owned(),
        machine: Some(machine),
        monitor: Some("ebb".to_owned()),
        socket: format!("/run/ebb/{name}.sock"),
        pid: Some(7),
        profile: "default".to_owned(),
        is_held: false,
        trouble: None,
        explanation: Some(Explanation {
            machine: name.to_owned(),
            action: None,
            rule: Rule::Enough { level: Level::Tight },
            clamp: None,
            doubt: None,
            since_ms: 4000,
        }),
    }
}

fn status(at_ms: u64, machines: Vec<MachineStatus>) -> Status {
    Status {
        version: "1".to_owned(),
        at_ms,
        level: Level::Tight,
        cause: Cause::Available { available_bytes: 4 * GIB, limit_bytes: 5 * GIB },
        since_ms: 0,
        host: Host {
            total_bytes: 16 * GIB,
            available_bytes: 4 * GIB,
            swap: Some(Swap { total_bytes: GIB, used_bytes: MIB, out_bytes: 0 }),
            pressure: None,
        },
        machines,
        problems: Vec::new(),
    }
}

/// Three machines whose orders by name, resident memory and use differ, after two answers in which
/// they grow in a fourth order.
fn three() -> Model {
    let mut model = Model::new(Source::Daemon);
    let answer = |at_ms, a, b, c| {
        let machines = vec![machine("b", b, 100), machine("a", a, 600), machine("c", c, 300)];
        Report::Daemon(Ok(status(at_ms, machines)))
    };
    model.receive(answer(10_000, 290, 200, 250));
    model.receive(answer(11_000, 300, 201, 400));
    model
}

fn machines(count: usize) -> Model {
    let mut model = Model::new(Source::Daemon);
    let machines = (0..count).map(|index| machine(&format!("web-{index:04}"), 300, 300));
    model.receive(Report::Daemon(Ok(status(10_000, machines.collect()))));
    model
}

fn names(model: &Model) -> Vec<String> {
    model.shown().map(|row| row.status.name.clone()).collect()
}

fn selected(model: &Model) -> String {
    model.selected().map(|row| row.status.name.clone()).unwrap_or_default()
}

fn press(model: &mut Model, code: KeyCode) -> Effect {
    model.press(KeyEvent::new(code, KeyModifiers::NONE))
}

fn typed(model: &mut Model, text: &str) -> Effect {
    text.chars().map(|each| press(model, KeyCode::Char(each))).last().unwrap()
}

fn buffer(model: &Model, colours: Colours, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(model, colours, frame.area(), frame.buffer_mut())).unwrap();
    terminal.backend().buffer().clone()
}

fn picture(model: &Model, width: u16, height: u16) -> String {
    let buffer = buffer(model, Colours::No, width, height);
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    let lines: Vec<_> = (0..height).map(|y| line(y).trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

#[test]
fn a_picture() {
    let picture = picture(&three(), 100, 30);
    let bar = format!("[{}{}] 25 % available", "#".repeat(57), ".".repeat(19));
    let first: Vec<_> = picture.lines().take(2).collect();
    let host = "host tight: 4.0 GiB of 16.0 GiB available (tight below 5.0 GiB), \
                swap 1.0 MiB of 1.0 GiB";
    assert_eq!(first, [host, &bar]);
    assert!(picture.contains("-- a\n"), "{picture}");
    for line in [
        "machine   a",
        "because   nothing to do: the host is tight",
        "# in use  + cache  - free, held  ? unknown  = merged  . returned  o balloon",
        "q end  ? help  arrows jk move  s sort: name  / filter  enter details  h hold",
    ] {
        assert!(picture.contains(line), "no {line:?}:\n{picture}");
    }
    let row = picture.lines().find(|line| line.starts_with("a ")).unwrap();
    for value in ["ebb", "1.0 GiB", "300.0 MiB", "296.0 MiB", "+10.0 MiB/s", "enough"] {
        assert!(row.contains(value), "no {value:?}: {row}");
    }
    // 296 of 1024 MiB in use, 4 cache, 596 returned, 128 in the balloon.
    let bar: String = row.chars().filter(|each| "#+-?=.o".contains(*each)).collect();
    assert!(bar.contains("###") && bar.contains("...o"), "{row}");
}

#[test]
fn colours_are_used_unless_they_are_not_wanted() {
    let coloured = |colours| {
        let buffer = buffer(&three(), colours, 100, 30);
        let has = |colour| buffer.content.iter().any(|cell| cell.fg == colour);
        [Color::Blue, Color::Cyan, Color::Yellow, Color::Green, Color::Magenta].map(has)
    };
    assert_eq!(coloured(Colours::Yes), [true; 5]);
    assert_eq!(coloured(Colours::No), [false; 5]);
}

#[test]
fn the_order_changes_and_the_selection_stays() {
    let mut model = three();
    assert_eq!((model.sort, names(&model).join("")), (Sort::Name, "abc".to_owned()));
    press(&mut model, KeyCode::Down);
    assert_eq!(selected(&model), "b");
    // In use: a 296, b 796, c 596. Growth: a 10, b 1, c 150.
    for (sort, order) in
        [(Sort::Resident, "cab"), (Sort::InUse, "bca"), (Sort::Growth, "cab"), (Sort::Name, "abc")]
    {
        typed(&mut model, "s");
        assert_eq!((model.sort, names(&model).join("").as_str()), (sort, order));
        assert_eq!(selected(&model), "b");
        assert!(picture(&model, 100, 30).contains(&format!("sort: {}", sort.name())));
    }
}

#[test]
fn what_is_not_known_is_last() {
    let mut model = Model::new(Source::Daemon);
    let mut unknown = machine("a", 0, 0);
    unknown.machine = None;
    let empty = machine("b", 0, 1024);
    model.receive(Report::Daemon(Ok(status(1, vec![unknown, empty]))));
    for sort in [Sort::Resident, Sort::InUse] {
        typed(&mut model, "s");
        assert_eq!((model.sort, names(&model).join("")), (sort, "ba".to_owned()));
    }
}

#[test]
fn keys_move_the_selection() {
    let mut model = machines(30);
    let mut after = |code| {
        assert_eq!(press(&mut model, code), Effect::None);
        model.position()
    };
    assert_eq!(after(KeyCode::Up), 0);
    assert_eq!(after(KeyCode::Down), 1);
    assert_eq!(after(KeyCode::Char('j')), 2);
    assert_eq!(after(KeyCode::Char('k')), 1);
    assert_eq!(after(KeyCode::PageDown), 11);
    assert_eq!(after(KeyCode::PageUp), 1);
    assert_eq!(after(KeyCode::End), 29);
    assert_eq!(after(KeyCode::Down), 29);
    assert_eq!(after(KeyCode::Home), 0);
}

#[test]
fn a_filter_is_typed_kept_and_ended() {
    let mut model = machines(30);
    press(&mut model, KeyCode::End);
    typed(&mut model, "/WEB-001");
    // Keys are text now.
    assert!(matches!(model.mode, Mode::Filter));
    assert_eq!(model.shown().len(), 10);
    assert!(picture(&model, 100, 30).contains("name: WEB-001_"));
    assert_eq!(typed(&mut model, "q"), Effect::None);
    assert!(picture(&model, 100, 30).contains("no machine has such a name"));
    assert_eq!(selected(&model), "");
    // Nothing is done to a machine that is not shown.
    press(&mut model, KeyCode::Enter);
    assert_eq!(typed(&mut model, "h"), Effect::None);
    picture(&model, 100, 30);
    typed(&mut model, "/");
    press(&mut model, KeyCode::Backspace);
    press(&mut model, KeyCode::Enter);
    assert_eq!((&model.mode, model.shown().len()), (&Mode::List, 10));
    typed(&mut model, "/");
    press(&mut model, KeyCode::Esc);
    assert_eq!((&model.mode, model.shown().len()), (&Mode::List, 30));
    typed(&mut model, "/");
    typed(&mut model, &"x".repeat(1000));
    assert_eq!(model.filter.len(), 64);
    press(&mut model, KeyCode::Char('\u{1b}'));
    assert!(!model.filter.contains('\u{1b}'));
}

#[test]
fn details_fill_the_screen_and_scroll() {
    let mut model = three();
    press(&mut model, KeyCode::Enter);
    let shown = picture(&model, 80, 24);
    assert!(shown.starts_with("machine   a\n"), "{shown}");
    assert!(shown.contains("enter back"), "{shown}");
    typed(&mut model, "jj");
    press(&mut model, KeyCode::Up);
    press(&mut model, KeyCode::Down);
    assert_eq!(model.mode, Mode::Details(2));
    assert!(!picture(&model, 80, 24).contains("machine   a\n"));
    typed(&mut model, &"j".repeat(100));
    assert!(picture(&model, 80, 24).starts_with("since"), "{}", picture(&model, 80, 24));
    press(&mut model, KeyCode::Esc);
    assert_eq!(model.mode, Mode::List);
}

#[test]
fn help_names_every_key() {
    let mut model = three();
    typed(&mut model, "?");
    let shown = picture(&model, 100, 30);
    for key in ["arrows j k", "s  ", "/  ", "Enter", "h  ", "p  ", "r  ", "q Esc", "Ctrl-C"] {
        assert!(shown.contains(key), "no {key:?}:\n{shown}");
    }
    assert_eq!(typed(&mut model, "q"), Effect::None);
    assert_eq!(model.mode, Mode::List);
}

#[test]
fn three_keys_end_it() {
    let mut model = three();
    assert_eq!(typed(&mut model, "q"), Effect::End);
    assert_eq!(press(&mut model, KeyCode::Esc), Effect::End);
    let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    for before in ["/", "?", "", "s"] {
        typed(&mut model, &format!("{before} "));
        assert_eq!(model.press(control_c), Effect::End);
    }
}

#[test]
fn combined_keys_are_no_commands() {
    let mut model = three();
    for modifiers in [KeyModifiers::CONTROL, KeyModifiers::ALT] {
        for key in ['h', 'q', 's', '/', '?'] {
            assert_eq!(model.press(KeyEvent::new(KeyCode::Char(key), modifiers)), Effect::None);
        }
    }
    assert_eq!((&model.mode, model.sort), (&Mode::List, Sort::Name));
    typed(&mut model, "/ab");
    model.press(KeyEvent::new(KeyCode::Char('h'), KeyModifiers::CONTROL));
    assert_eq!(model.filter, "a");
}

#[test]
fn a_machine_is_held_and_released() {
    let mut model = three();
    let hold = Act::Hold("a".to_owned());
    assert_eq!(typed(&mut model, "h"), Effect::Act(hold.clone()));
    assert!(picture(&model, 80, 20).contains("hold a ..."));
    // Once at a time.
    assert_eq!(typed(&mut model, "h"), Effect::None);
    assert!(picture(&model, 80, 20).contains("has not ended yet"));
    model.receive(Report::Done(hold, Err("the daemon\u{1b}[2J is\naway".to_owned())));
    assert!(picture(&model, 80, 20).contains("the daemon\\u{1b}[2J is away"));
    assert_eq!(typed(&mut model, "h"), Effect::Act(Act::Hold("a".to_owned())));
    let held = MachineStatus { is_held: true, ..machine("a", 1, 1) };
    model.receive(Report::Daemon(Ok(status(1, vec![held]))));
    assert_eq!(typed(&mut model, "h"), Effect::Act(Act::Release("a".to_owned())));
    // The daemon decides about the rest.
    for key in ["p", "r"] {
        assert_eq!(typed(&mut model, key), Effect::None);
        assert_eq!(model.mode, Mode::List);
        assert!(picture(&model, 80, 20).contains("the daemon decides"));
    }
}

#[test]
fn a_daemon_that_goes_away_is_shown_as_such() {
    let mut model = Model::new(Source::Daemon);
    model.receive(Report::Daemon(Err("no ebbd serves x\u{1b}c\nstart it".to_owned())));
    let shown = picture(&model, 80, 20);
    assert!(shown.contains("no ebbd serves x\\u{1b}c start it"), "{shown}");
    assert!(shown.contains("no machines"), "{shown}");
    model.tick(Duration::from_secs(5));
    model.receive(Report::Daemon(Ok(status(1, vec![machine("a", 1, 1)]))));
    assert!(!picture(&model, 80, 20).contains("no ebbd"));
    model.tick(Duration::from_secs(17));
    model.receive(Report::Daemon(Err("it is away".to_owned())));
    let shown = picture(&model, 80, 20);
    assert!(shown.contains("as of 12.0 s ago: it is away"), "{shown}");
    assert!(shown.contains("\na  "), "{shown}");
    // Also where there is little space.
    assert!(picture(&model, 20, 5).starts_with("as of 12.0 s ago"), "{}", picture(&model, 20, 5));
}

#[test]
fn a_machine_that_vanishes_leaves_the_selection_at_its_place() {
    let mut model = three();
    press(&mut model, KeyCode::End);
    assert_eq!(selected(&model), "c");
    let two = vec![machine("a", 1, 1), machine("b", 1, 1)];
    model.receive(Report::Daemon(Ok(status(12_000, two))));
    assert_eq!(selected(&model), "b");
    model.receive(Report::Daemon(Ok(status(13_000, Vec::new()))));
    assert!(model.selected().is_none());
    for code in [KeyCode::Down, KeyCode::End, KeyCode::Enter, KeyCode::Down, KeyCode::Char('h')] {
        assert_eq!(press(&mut model, code), Effect::None);
        picture(&model, 80, 24);
    }
}

#[test]
fn troubles_and_problems_are_escaped() {
    let mut bad = machine("evil\u{1b}[31m\u{202e}\nname", 1, 1);
    bad.trouble = Some("it sent\u{9b}2J\nnonsense".to_owned());
    bad.monitor = Some("\u{1b}ebb".to_owned());
    let mut answer = status(1, vec![bad]);
    answer.problems = vec!["the state\u{1b}[H is not\nsaved".to_owned()];
    let mut model = Model::new(Source::Daemon);
    model.receive(Report::Daemon(Ok(answer)));
    let shown = picture(&model, 160, 30);
    for text in [
        "evil\\u{1b}[31m\\u{202e} name",
        "it sent\\u{9b}2J nonsense",
        "problem: the state\\u{1b}[H is not saved",
        "\\u{1b}e",
    ] {
        assert!(shown.contains(text), "no {text:?}:\n{shown}");
    }
    let is_control = |each: char| (each.is_control() && each != '\n') || each == '\u{202e}';
    assert!(!shown.contains(is_control), "{shown}");
    assert!(!plain(&model, 160).contains(is_control));
}

/// Every size of a terminal, in every mode.
#[test]
fn no_terminal_is_too_small() {
    let mut long = machine("名前".repeat(30).as_str(), 300, 300);
    long.trouble = Some("x".repeat(5000));
    let absurd = Machine {
        size_bytes: u64::MAX,
        resident_bytes: Some(u64::MAX),
        ..machine("b", 1, 1).machine.unwrap()
    };
    let absurd = MachineStatus { machine: Some(absurd), ..machine("b", 1, 1) };
    let mut answer = status(u64::MAX, vec![long, absurd]);
    answer.problems = vec!["y".repeat(5000); 50];
    answer.host.available_bytes = u64::MAX;
    let mut model = Model::new(Source::Daemon);
    model.receive(Report::Daemon(Ok(answer)));
    for keys in ["", "?", " /abc", "\r", "j"] {
        for key in keys.chars() {
            let code = if key == '\r' { KeyCode::Enter } else { KeyCode::Char(key) };
            press(&mut model, code);
        }
        for (width, height) in (1..60).flat_map(|width| (1..25).map(move |height| (width, height)))
        {
            buffer(&model, Colours::Yes, width, height);
        }
        buffer(&model, Colours::Yes, 500, 200);
        if keys.is_empty() {
            let small = picture(&model, 20, 5);
            assert!(small.contains("q end  ? help"), "{small}");
        }
        model.mode = Mode::List;
        model.filter.clear();
        model.arrange();
    }
    for width in 0..200 {
        plain(&model, width);
    }
}

#[test]
fn a_thousand_machines_scroll() {
    let mut model = machines(1000);
    for code in [KeyCode::Down, KeyCode::PageDown, KeyCode::End, KeyCode::Up, KeyCode::Home] {
        press(&mut model, code);
        let shown = picture(&model, 80, 24);
        let name = selected(&model);
        assert!(shown.lines().any(|line| line.starts_with(&name)), "{name}\n{shown}");
    }
    let text = plain(&model, 100);
    assert_eq!(text.lines().filter(|line| line.starts_with("web-")).count(), 1000);
    assert!(text.lines().all(|line| line.chars().count() <= 100));
}

#[test]
fn one_picture_as_text() {
    let text = plain(&three(), 100);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("host tight"), "{text}");
    assert!(lines[2].starts_with("MACHINE  MONITOR"), "{text}");
    let starts: String = lines[3..6].iter().filter_map(|line| line.chars().next()).collect();
    assert_eq!((starts.as_str(), lines.len()), ("abc", 7), "{text}");
    assert!(lines[6].starts_with("# in use"), "{text}");
    let none = plain(&Model::new(Source::Daemon), 100);
    assert!(none.contains("no machines"), "{none}");
    // A wide character takes two columns.
    let mut model = Model::new(Source::Daemon);
    model.receive(Report::Daemon(Ok(status(1, vec![machine("名前", 1, 1)]))));
    assert!(plain(&model, 100).contains("名前     ebb"), "{}", plain(&model, 100));
}
