//! `docs/openapi.json` and the server agree: its schemas are those of the types, every documented
//! answer can be provoked and has the documented form, and nothing undocumented is served.
//!
//! Paths, examples and statuses are written in the document by hand; schemas and names of metrics
//! come from the code: `UPDATE=1 cargo test -p ebb-vmm --test api openapi` writes them.

use std::collections::{BTreeMap, BTreeSet};

use ebb_vmm::api::fields::{drop_null, request_schema};
use ebb_vmm::api::reply::ErrorDocument;
use ebb_vmm::api::route::ROUTES;
use ebb_vmm::api::*;
use schemars::JsonSchema;
use schemars::generate::{Contract, SchemaSettings};
use serde_json::{Map, Value, json};

use crate::double::Mood;
use crate::wire::{Answer, Served, serve};

fn document() -> Value {
    serde_json::from_str(OPENAPI_JSON).unwrap()
}

/// The schemas of all documents by their names.
fn schemas() -> Map<String, Value> {
    fn request<T: JsonSchema>(name: &str) -> (String, Value) {
        (name.to_owned(), request_schema::<T>().to_value())
    }
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    settings.contract = Contract::Serialize;
    let mut replies = settings.into_generator();
    replies.subschema_for::<VmInfo>();
    replies.subschema_for::<TrimReport>();
    replies.subschema_for::<SnapshotReport>();
    replies.subschema_for::<ParkReport>();
    replies.subschema_for::<ParkStatus>();
    replies.subschema_for::<BalloonInfo>();
    replies.subschema_for::<StatisticsDocument>();
    replies.subschema_for::<CheckpointReport>();
    replies.subschema_for::<WorkingSet>();
    replies.subschema_for::<FreePagesReport>();
    replies.subschema_for::<ReclaimReport>();
    replies.subschema_for::<MigrationStatus>();
    replies.subschema_for::<DisksInfo>();
    replies.subschema_for::<LimitsInfo>();
    replies.subschema_for::<NetInfo>();
    replies.subschema_for::<MergeInfo>();
    replies.subschema_for::<ConsoleInfo>();
    replies.subschema_for::<ErrorDocument>();
    let mut schemas = replies.take_definitions(false);
    // Bounds apply to requests; the kernel may be set otherwise.
    for setting in schemas["MergeSettings"]["properties"].as_object_mut().unwrap().values_mut() {
        let setting = setting.as_object_mut().unwrap();
        setting.shift_remove("maximum");
        setting.shift_remove("default");
        setting.entry("minimum").and_modify(|minimum| *minimum = 0.into());
    }
    schemas["ErrorDetail"]["properties"].as_object_mut().unwrap().values_mut().for_each(drop_null);
    schemas.extend([
        request::<SnapshotTarget>("SnapshotTarget"),
        request::<CheckpointTarget>("CheckpointTarget"),
        request::<ParkRequest>("ParkRequest"),
        request::<MigrationRequest>("MigrationRequest"),
        request::<BalloonTarget>("BalloonTarget"),
        request::<PauseRequest>("PauseRequest"),
        request::<StatisticsInterval>("StatisticsInterval"),
        request::<FreePagesRequest>("FreePagesRequest"),
        request::<ReclaimRequest>("ReclaimRequest"),
        request::<DiskResize>("DiskResize"),
        request::<LimitsChange>("LimitsChange"),
        request::<NetChange>("NetChange"),
        request::<MergeSettings>("MergeChange"),
    ]);
    schemas["MergeChange"]["minProperties"] = 1.into();
    schemas.values_mut().for_each(tidy);
    schemas
}

/// Removes keys specific to Rust or this API, joins lines, and closes objects.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            if !members.get("properties").is_some_and(Value::is_object)
                || members.get("type").is_some_and(|name| name == "object")
            {
                for key in ["title", "format", "x-unit", "x-form", "x-conflicts-with"] {
                    // An object is a field of that name.
                    if !members.get(key).is_some_and(Value::is_object) {
                        members.shift_remove(key);
                    }
                }
            }
            if let Some(Value::String(text)) = members.get_mut("description") {
                *text = text.replace('\n', " ");
            }
            if members.get("type").is_some_and(|name| name == "object") {
                members.insert("additionalProperties".to_owned(), false.into());
            }
            members.values_mut().for_each(tidy);
        }
        Value::Array(values) => values.iter_mut().for_each(tidy),
        _ => {}
    }
}

#[test]
fn the_schemas_are_those_of_the_types() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/openapi.json");
    let mut generated = document();
    generated["components"]["schemas"] = schemas().into();
    let names = prometheus::names();
    generated["paths"]["/metrics"]["get"]["description"] =
        format!("Text exposition format, version 0.0.4. Names: {names}").into();
    let text = format!("{}\n", serde_json::to_string_pretty(&generated).unwrap());
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, text).unwrap();
    } else {
        let update = "UPDATE=1 cargo test -p ebb-vmm --test api openapi";
        assert!(text == OPENAPI_JSON, "docs/openapi.json is not what the types say; {update}");
    }
}

/// The operation of each documented method of each path.
fn operations(document: &Value) -> BTreeMap<(String, String), Value> {
    let mut operations = BTreeMap::new();
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            operations.insert((method.to_uppercase(), path.clone()), operation.clone());
        }
    }
    operations
}

/// Checks an answer against what its operation documents for its status.
fn check(document: &Value, operation: &Value, answer: &Answer) {
    let responses = &operation["responses"];
    let code = answer.status.to_string();
    let response = responses.get(&code).unwrap_or(&responses["default"]);
    let content = response["content"].as_object().unwrap();
    let content_type = answer.header("content-type").unwrap();
    let media_type = content_type.split(';').next().unwrap();
    let media = content
        .get(media_type)
        .unwrap_or_else(|| panic!("{media_type} is not documented for {code}"));
    if media_type == "application/json" {
        validate(document, &media["schema"], &answer.json());
    }
}

fn validate(document: &Value, schema: &Value, instance: &Value) {
    let mut root = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "components": document["components"],
    });
    for (key, value) in schema.as_object().unwrap() {
        root[key] = value.clone();
    }
    let validator = jsonschema::draft202012::new(&root).unwrap();
    let errors: Vec<String> =
        validator.iter_errors(instance).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{instance}\ndoes not match\n{schema}\n{errors:#?}");
}

/// How to provoke each status: the machine's mood, a suffix of the path, and the body.
fn provocation(method: &str, path: &str, status: &str) -> (Mood, &'static str, &'static str) {
    let good_body = match (method, path) {
        ("PUT", "/balloon") => r#"{"target_bytes": 4096}"#,
        ("PUT", "/vm/snapshot") => r#"{"path": "/tmp/x"}"#,
        ("PUT", "/vm/checkpoint") => r#"{"name": "x"}"#,
        ("PUT", "/vm/migrate") => r#"{"to": "unix:/tmp/x"}"#,
        ("PUT", "/disks") => r#"{"device": "disk0"}"#,
        ("PUT", "/limits") => r#"{"device": "disk0", "ops": 5}"#,
        ("PUT", "/net") => r#"{"device": "net0", "link": "down"}"#,
        ("PUT", "/merge") => r#"{"run": "stop"}"#,
        ("PUT", "/balloon/statistics-interval") => r#"{"interval_seconds": 1}"#,
        _ => "",
    };
    match (method, status) {
        (_, "200" | "202") => (Mood::Willing, "", good_body),
        ("GET", "400") => (Mood::Willing, "?unknown=1", ""),
        (_, "400") => (Mood::Willing, "", "{"),
        (_, "404") => (Mood::NoBalloon, "", good_body),
        (_, "409") => (Mood::WrongState, "", good_body),
        (_, "422") => (Mood::Willing, "", r#"{"unknown": 1}"#),
        (_, "500") => (Mood::Broken, "", good_body),
        (_, "504") => (Mood::Silent, "", ""),
        _ => panic!("{method} {path} documents {status}, which this test cannot provoke"),
    }
}

#[test]
fn every_documented_answer_can_be_provoked_and_matches_its_schema() {
    let document = document();
    let moods = [Mood::Willing, Mood::Silent, Mood::WrongState, Mood::Broken, Mood::NoBalloon];
    let servers: Vec<(Mood, Served)> = moods.into_iter().map(|mood| (mood, serve(mood))).collect();
    let mut checked = 0;
    for ((method, path), operation) in operations(&document) {
        for status in
            operation["responses"].as_object().unwrap().keys().filter(|status| *status != "default")
        {
            let (mood, suffix, body) = provocation(&method, &path, status);
            let (_, served) = servers.iter().find(|(server_mood, _)| *server_mood == mood).unwrap();
            let answer = served.ask(&method, &format!("{path}{suffix}"), body);
            assert_eq!(answer.status.to_string(), *status, "{method} {path}: {}", answer.body);
            check(&document, &operation, &answer);
            checked += 1;
        }
    }
    assert!(checked > ROUTES.len() * 2);
}

#[test]
fn every_route_is_documented_and_every_documented_route_exists() {
    let documented: BTreeSet<_> = operations(&document()).into_keys().collect();
    let served: BTreeSet<_> = ROUTES
        .iter()
        .map(|route| (route.method.name().to_owned(), route.path.to_owned()))
        .collect();
    assert_eq!(documented, served);
}

#[test]
fn no_status_is_undocumented() {
    let document = document();
    let bodies = [
        "",
        "{}",
        "{",
        "[]",
        r#"{"target_bytes": 0}"#,
        r#"{"target_bytes": 1e30}"#,
        r#"{"interval_seconds": -1}"#,
        r#"{"min_order": 19}"#,
        r#"{"min_order": 18, "timeout_ms": 0}"#,
        r#"{"device": "disk9", "bandwidth": 1}"#,
        r#"{"device": "disk0", "ops_burst": 1}"#,
        r#"{"device": "disk9"}"#,
        r#"{"device": "disk0", "size_bytes": 512}"#,
        r#"{"to": ""}"#,
        r#"{"run": "unmerge", "cpu_percent": 10}"#,
        r#"{"run": "dance"}"#,
        r#"{"pages_per_second": 0}"#,
        r#"{"pages_per_second": 5, "target_scan_seconds": 5}"#,
        r#"{"to": "unix:/x", "holes": 1}"#,
        r#"{"to": "unix:/x", "tls_key": "/k"}"#,
    ];
    for mood in [Mood::Willing, Mood::WrongState, Mood::Broken, Mood::NoBalloon] {
        let served = serve(mood);
        for ((method, path), operation) in operations(&document) {
            for body in bodies {
                for query in ["", "?", "?max_age_ms=100", "?max_age_ms=x", "?x"] {
                    let answer = served.ask(&method, &format!("{path}{query}"), body);
                    let code = answer.status.to_string();
                    assert!(
                        operation["responses"].get(&code).is_some(),
                        "{method} {path}{query} {body}: {code}"
                    );
                    check(&document, &operation, &answer);
                }
            }
        }
    }
}

#[test]
fn wrong_methods_and_paths_have_the_documented_form() {
    let document = document();
    let served = serve(Mood::Willing);
    let error = json!({ "$ref": "#/components/schemas/Error" });
    for (_, path) in operations(&document).keys() {
        for method in ["GET", "PUT", "POST", "DELETE", "PATCH", "OPTIONS", "BREW"] {
            if document["paths"][path].get(method.to_lowercase()).is_some() {
                continue;
            }
            let answer = served.ask(method, path, "");
            assert_eq!(answer.status, 405, "{method} {path}");
            let allowed: BTreeSet<_> =
                answer.header("allow").unwrap().split(", ").map(str::to_lowercase).collect();
            let documented: BTreeSet<_> =
                document["paths"][path].as_object().unwrap().keys().cloned().collect();
            assert_eq!(allowed, documented, "{path}");
            validate(&document, &error, &answer.json());
        }
    }
    let answer = served.ask("GET", "/nothing", "");
    assert_eq!(answer.status, 404);
    validate(&document, &error, &answer.json());
}

#[test]
fn the_examples_match_their_schemas_and_the_requests_are_accepted() {
    let document = document();
    let served = serve(Mood::Willing);
    let mut examples = 0;
    for ((method, path), operation) in operations(&document) {
        let request = operation.get("requestBody").into_iter();
        let responses = operation["responses"].as_object().unwrap().values();
        for content in request.chain(responses).filter_map(|holder| holder.get("content")) {
            for media in content.as_object().unwrap().values() {
                if let Some(example) = media.get("example") {
                    validate(&document, &media["schema"], example);
                    examples += 1;
                }
            }
        }
        if let Some(example) = operation.pointer("/requestBody/content/application~1json/example") {
            let answer = served.ask(&method, &path, &example.to_string());
            assert!(answer.status < 300, "{method} {path}: {}", answer.body);
        }
    }
    assert!(examples >= 4);
}

#[test]
fn the_document_describes_the_version_and_is_served_unchanged() {
    let served = serve(Mood::Willing);
    let answer = served.ask("GET", "/openapi.json", "");
    assert_eq!(answer.body, OPENAPI_JSON);
    assert_eq!(document()["info"]["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn every_metric_is_documented() {
    let document = document();
    let description = document["paths"]["/metrics"]["get"]["description"].as_str().unwrap();
    let answer = serve(Mood::Willing).ask("GET", "/metrics", "");
    let samples = prometheus::parse(&answer.body).unwrap();
    assert!(samples.len() > 10);
    for sample in samples {
        let known = |name: &str| {
            description.contains(&format!("`{name}`"))
                || description.contains(&format!("`{name}{{kind}}`"))
        };
        let prefixes = ["ebb_balloon_", "ebb_merge_", "ebb_vsock_"];
        let short = prefixes
            .iter()
            .find_map(|prefix| sample.name.strip_prefix(prefix))
            .unwrap_or(&sample.name);
        assert!(known(&sample.name) || known(short), "{}", sample.name);
    }
}
